"""Initial values of parameters."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from xformer.backends import Array, Device, DType, resolve
from xformer.config import check_count
from xformer.errors import ConfigError, check_arguments
from xformer.random import Rng

_MAX_SIZE = 2**60  # elements, so that NumPy can address the bytes


class Initializer:
    """Source of the initial parameters of layers.

    Values are drawn on the host, so the same seed gives the same parameters on every backend. Each draw gives new
    values: two layers made with one initializer differ.

    Args:
        xp: Array library, as a module or by name.
        seed: Seed, or an `Rng` to draw from; None makes read-only zeros on NumPy that take no memory, as stand-ins for
            parameters that are loaded.
        dtype: Floating dtype of the parameters; default float32.
        device: Device of the parameters, as the library names it.

    Raises:
        BackendError: If the library, dtype or device is not available.
    """

    @check_arguments(
        scheme="layers choose the scheme; call initializer.xavier_uniform(shape) or initializer.normal(...)"
    )
    def __init__(
        self, xp: Any = "numpy", *, seed: int | Rng | None = 0, dtype: DType | str | None = None, device: Device = None
    ):
        self.xp = resolve(xp)
        self.dtype = self.xp.default_float(dtype)
        self.device = device
        self._rng = seed if seed is None or isinstance(seed, Rng) else Rng(seed).fold_in("parameters")
        self._num_draws = 0

    def xavier_uniform(self, shape: tuple[int, int]) -> Array:
        """Draw uniform values of variance 2 / (fan_in + fan_out) (Glorot and Bengio, 2010).

        Args:
            shape: (fan_in, fan_out).
        """
        return self.uniform(shape, math.sqrt(6.0 / sum(shape)))

    def uniform(self, shape: tuple[int, ...], bound: float) -> Array:
        """Draw uniform values from -bound to bound."""
        _check_sizes(shape)
        return self._draw(shape, lambda rng: rng.uniform(shape, -bound, bound))

    def normal(self, shape: tuple[int, ...], standard_deviation: float) -> Array:
        """Draw normal values with mean zero."""
        _check_sizes(shape)
        return self._draw(shape, lambda rng: rng.normal(shape, standard_deviation))

    # Constants draw nothing, so a layer with another norm, or without biases, leaves all other parameters as they were.

    def zeros(self, shape: tuple[int, ...]) -> Array:
        """Return zeros, for biases."""
        return self.full(shape, 0.0)

    def ones(self, shape: tuple[int, ...]) -> Array:
        """Return ones, for the weights of norms."""
        return self.full(shape, 1.0)

    def full(self, shape: tuple[int, ...], value: float) -> Array:
        """Return an array of one value."""
        _check_sizes(shape)
        if self._rng is None:
            if math.prod(shape) > _MAX_SIZE:
                raise ConfigError(f"a parameter has shape {shape}; expected at most {_MAX_SIZE} elements")
            return np.broadcast_to(np.float32(value), shape)
        return self._array(np.full(shape, value))

    def _draw(self, shape: tuple[int, ...], draw: Callable[[Rng], Any]) -> Array:
        self._num_draws += 1
        return self.full(shape, 0.0) if self._rng is None else self._array(draw(self._rng.fold_in(self._num_draws)))

    def _array(self, values: Any) -> Array:
        return self.xp.from_host(values, dtype=self.dtype, device=self.device)


def _check_sizes(shape: tuple[int, ...]) -> None:
    for size in shape:
        check_count(f"a size of a parameter of shape {shape}", size, at_least=0)


Init = Initializer | int | None  # argument `init` of a layer; None is an error


def initializer(init: Init) -> Initializer:
    """Return an initializer; a seed makes a new one on NumPy.

    Raises:
        ConfigError: If `init` is None: equal default seeds would give equal parameters to several layers.
    """
    if init is None:
        raise ConfigError(
            "init is missing; pass a seed, e.g. init=0, another one for each layer, or one Initializer to all layers"
        )
    return init if isinstance(init, Initializer) else Initializer(seed=init)
