"""Dropout that is active when, and only when, an Rng is passed."""

from __future__ import annotations

from numbers import Real

from xformer.backends import Array, array_namespace, device
from xformer.errors import ConfigError
from xformer.ops.activations import dropout
from xformer.random import Rng, check_rng
from xformer.tree import Module, check_array


class Dropout(Module):
    """Zero elements with probability `rate` and scale up the rest (Srivastava et al., 2014).

    There is no training mode: the layer is the identity unless it is called with an `Rng`.

    Args:
        rate: Probability that an element is zeroed, in [0, 1).

    Raises:
        ConfigError: If the rate is not in [0, 1).
    """

    rate: float

    def __init__(self, rate: float):
        if not isinstance(rate, Real) or not 0.0 <= rate < 1.0:
            raise ConfigError(f"dropout is {rate!r}; expected a probability in [0, 1)")
        self.rate = rate

    def __call__(self, x: Array, rng: Rng | None = None) -> Array:
        """Apply dropout.

        Args:
            x: Floating array of any shape.
            rng: Source of the mask, or None for no dropout.

        Returns:
            Array of the shape and dtype of `x`.
        """
        shape = check_array(x, "x")
        if rng is None:
            return x
        mask, keep_probability = self.draw(shape, x, rng)
        return x if mask is None else dropout(x, mask, keep_probability)

    def draw(self, shape: tuple[int, ...], like: Array, rng: Rng | None) -> tuple[Array | None, float]:
        """Draw a mask without applying it.

        Args:
            shape: Shape of the mask.
            like: Array of the library and device.
            rng: Source of the mask, or None for no dropout.

        Returns:
            The boolean mask, True for elements to keep, and the probability of keeping one; (None, 1.0) without
            dropout.

        Raises:
            ConfigError: If rng is neither an Rng nor None.
        """
        if not isinstance(rng, Rng):
            check_rng(rng)
        if rng is None or self.rate == 0.0:
            return None, 1.0
        return rng.bernoulli(1.0 - self.rate, shape, array_namespace(like), device(like))
