"""Dropout that acts when, and only when, an Rng is passed."""

from __future__ import annotations

from xformer.backends import Array, array_namespace, device
from xformer.errors import ConfigError
from xformer.ops.dropout import dropout
from xformer.random import Rng
from xformer.tree import Module


class Dropout(Module):
    """Zero elements with probability `rate` and scale up the rest (Srivastava et al., 2014).

    There is no training flag: without an Rng the layer does nothing.
    """

    rate: float

    def __init__(self, rate: float):
        if not 0.0 <= rate < 1.0:
            raise ConfigError(f"dropout is {rate}; expected a probability in [0, 1)")
        self.rate = rate

    def __call__(self, x: Array, rng: Rng | None) -> Array:
        """x: any shape. rng: where the mask is drawn from, or None for no dropout."""
        keep, keep_probability = self.draw(tuple(x.shape), x, rng)
        return x if keep is None else dropout(x, keep, keep_probability)

    def draw(self, shape: tuple[int, ...], like: Array, rng: Rng | None) -> tuple[Array | None, float]:
        """Draw a mask of `shape` in the library and on the device of `like`: (keep, keep_probability)."""
        if rng is None or self.rate == 0.0:
            return None, 1.0
        return rng.bernoulli(1.0 - self.rate, shape, array_namespace(like), device(like))
