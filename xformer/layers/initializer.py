"""Where new parameters come from: a library, a dtype, a device and a seed."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from xformer.backends import Array, Device, DType, default_float, from_host, resolve
from xformer.random import Rng


class Initializer:
    """Makes the parameters of layers, one after the other.

    xp: an array library, as a module or by name. Values are drawn on the host, so that the same seed gives the
    same parameters in every library.

    Raises BackendError when the library, dtype or device is not there.
    """

    def __init__(self, xp: Any, *, seed: int | Rng = 0, dtype: DType | str | None = None, device: Device = None):
        self.xp = resolve(xp)
        self.dtype = default_float(self.xp, dtype)
        self.device = device
        self._rng = seed if isinstance(seed, Rng) else Rng(seed).fold("parameters")
        self._made = 0

    def _next(self) -> Rng:
        self._made += 1
        return self._rng.fold(self._made)

    def _array(self, host: Any) -> Array:
        return from_host(self.xp, host, dtype=self.dtype, device=self.device)

    def xavier_uniform(self, shape: tuple[int, int]) -> Array:
        """Uniform with variance 2 / (fan_in + fan_out) (Glorot and Bengio, 2010). shape: (fan_in, fan_out)."""
        bound = math.sqrt(6.0 / sum(shape))
        return self._array(self._next().uniform(shape, -bound, bound))

    def normal(self, shape: tuple[int, ...], standard_deviation: float) -> Array:
        """Normal around zero."""
        return self._array(self._next().normal(shape, standard_deviation))

    # Constants draw nothing, so a layer with another norm, or without biases, leaves all other parameters as they were.

    def zeros(self, shape: tuple[int, ...]) -> Array:
        """All zeros, for biases."""
        return self._array(np.zeros(shape))

    def ones(self, shape: tuple[int, ...]) -> Array:
        """All ones, for the weights of norms."""
        return self._array(np.ones(shape))
