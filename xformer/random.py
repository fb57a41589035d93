"""Random numbers from explicit keys: the same `Rng` always draws the same values.

An `Rng` is immutable, like a JAX key. `split` and `fold` derive independent streams, so a value depends on the seed and
the labels of its stream, never on earlier draws. So training resumes to the bit (fold in the step number), and
rematerialization draws the same dropout masks again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any

import numpy as np

from xformer.backends import Array, Device, Namespace, backend_of, base_namespace
from xformer.backends.backend import RANDOM_BITS
from xformer.errors import ConfigError


@dataclass(frozen=True)
class Rng:
    """A source of random numbers, made by `Rng(seed)`; equal keys draw equal values in one array library.

    Attributes:
        key: Non-negative integer.
        counter: Scalar array that also selects what `bernoulli` draws (see `counted`), or None.

    >>> Rng(0).fold("dropout", 7) == Rng(0).fold("dropout", 7)
    True
    """

    key: int
    counter: Array | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.key, Integral) or isinstance(self.key, bool) or self.key < 0:
            raise ConfigError(f"seed is {self.key!r}; expected a non-negative integer")
        object.__setattr__(self, "key", int(self.key))

    def fold(self, *labels: int | str) -> Rng:
        """Return the stream with some labels, independent of this one and of streams with other labels."""
        # Quotes and escapes keep ("a", "b") apart from "a/b", and 1 from "1".
        texts = (repr(label) if isinstance(label, str) else str(int(label)) for label in labels)
        text = f"{self.key:x}/{'/'.join(texts)}".encode()
        return Rng(int.from_bytes(hashlib.blake2b(text, digest_size=16).digest(), "little"), self.counter)

    def split(self, count: int) -> tuple[Rng, ...]:
        """Return `count` independent streams."""
        return tuple(self.fold(index) for index in range(count))

    def counted(self, counter: Array) -> Rng:
        """Return a stream whose `bernoulli` draws other values for each value of an int64 scalar array.

        CuPy reads the counter on the device, so a step that is captured as a graph draws anew in each replay.
        """
        return Rng(self.key, counter)

    def generator(self) -> Any:
        """Return a NumPy generator seeded with the key, for draws on the host."""
        return np.random.Generator(np.random.PCG64DXSM(np.random.SeedSequence(self.key)))

    def permutation(self, count: int) -> list[int]:
        """Return the integers 0 to count-1 in random order."""
        return self.generator().permutation(count).tolist()

    def uniform(self, shape: tuple[int, ...], low: float = 0.0, high: float = 1.0) -> Any:
        """Draw a float64 NumPy array, uniform in [low, high)."""
        return self.generator().uniform(low, high, shape)

    def normal(self, shape: tuple[int, ...], standard_deviation: float = 1.0) -> Any:
        """Draw a float64 NumPy array, normal with mean 0."""
        return self.generator().normal(0.0, standard_deviation, shape)

    def bernoulli(
        self, probability: float, shape: tuple[int, ...], xp: Namespace, device: Device = None
    ) -> tuple[Array, float]:
        """Draw booleans in an array library, as dropout masks need them.

        Args:
            probability: Probability of True.
            shape: Shape of the array.
            xp: Namespace of the library.
            device: Device of the array.

        Returns:
            The array, and the exact probability: 16 random bits decide each element, so it is a multiple of 2**-16.
            Dropout that scales by the exact probability is unbiased.
        """
        threshold = max(1, round(probability * 2**RANDOM_BITS)) if probability > 0.0 else 0
        base = base_namespace(xp)
        backend = backend_of(base)
        if self.counter is None:
            mask = backend.bernoulli(base, self.key, threshold, shape, device)
        else:
            mask = backend.counted_bernoulli(base, self.key, self.counter, threshold, shape, device)
        return mask, threshold / 2**RANDOM_BITS


def split_rng(rng: Rng | None, count: int) -> Sequence[Rng | None]:
    """Return `count` independent streams, or as many times None.

    Raises:
        ConfigError: If rng is neither an Rng nor None.
    """
    if rng is None:
        return (None,) * count
    if not isinstance(rng, Rng):
        raise ConfigError(f"rng is {rng!r}; expected an Rng, e.g. xformer.Rng(0), or None")
    return rng.split(count)
