"""Random numbers from explicit keys: the same `Rng` always draws the same values.

An `Rng` is immutable, like a JAX key. `split` and `fold_in` derive independent streams, so a value depends on the seed
and the labels of its stream, never on earlier draws. A resumed run, which folds in the step number, is bit-identical,
and rematerialization draws the same dropout masks again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any

import numpy as np

from xformer.backends import Array, Device, Namespace, array_namespace, resolve
from xformer.backends.library import RANDOM_BITS
from xformer.errors import ConfigError


@dataclass(frozen=True)
class Rng:
    """A source of random numbers, made by `Rng(seed)`; equal keys draw equal values in one array library.

    Attributes:
        key: Non-negative integer.
        counter: Scalar array that also selects what `bernoulli` draws (see `with_counter`), or None.

    Examples:
        >>> Rng(0).fold_in("dropout", 7) == Rng(0).fold_in("dropout", 7)
        True
    """

    key: int
    counter: Array | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        is_integer = type(self.key) is int or (isinstance(self.key, Integral) and not isinstance(self.key, bool))
        if not is_integer or self.key < 0:
            raise ConfigError(f"seed is {self.key!r}; expected a non-negative integer")
        object.__setattr__(self, "key", int(self.key))

    def fold_in(self, *labels: int | str) -> Rng:
        """Return the stream with some labels, independent of this one and of streams with other labels.

        Raises:
            ConfigError: If a label is neither an integer nor a string.
        """
        texts = []
        for label in labels:
            is_known = type(label) in (int, str) or isinstance(label, Integral | str)  # the first takes less time
            if not is_known or isinstance(label, bool):
                raise ConfigError(f"a label is {label!r}; expected an integer or a string")
            # Quotes and escapes keep ("a", "b") apart from "a/b", and 1 from "1".
            texts.append(repr(str(label)) if isinstance(label, str) else str(int(label)))
        return Rng(_hash(f"{self.key:x}/{'/'.join(texts)}"), self.counter)

    def split(self, count: int) -> tuple[Rng, ...]:
        """Return `count` independent streams; stream i is the same for every count, and differs from `fold_in(i)`."""
        keys = (_hash(f"{self.key:x}/{index}", b"split") for index in range(count))
        return tuple(Rng(key, self.counter) for key in keys)

    def with_counter(self, counter: Array) -> Rng:
        """Return a stream whose `bernoulli` draws other values for each value of an int64 scalar array.

        CuPy reads the counter on the device, so a step that runs as a CUDA graph draws anew in each launch.
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
        library = resolve(xp).library
        if self.counter is None:
            mask = library.random_mask(self.key, threshold, shape, device)
        else:
            key = _hash(f"{self.key:x}", b"counter")  # so that a count is no other seed
            mask = array_namespace(self.counter).call_on_host(
                lambda counter: library.counted_random_mask(key, counter, threshold, shape, device), self.counter
            )
        return mask, threshold / 2**RANDOM_BITS


def _hash(text: str, derivation: bytes = b"") -> int:
    """Return the key of a derived stream; those of different derivations differ."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=16, person=derivation).digest(), "little")


def check_rng(rng: Any) -> None:
    """Raise ConfigError if a source of random numbers is neither an Rng nor None."""
    if rng is not None and not isinstance(rng, Rng):
        raise ConfigError(f"rng is {rng!r}; expected an Rng, e.g. xformer.Rng(0), or None")


def split_rng(rng: Rng | None, count: int) -> Sequence[Rng | None]:
    """Return `count` independent streams, or as many times None.

    Raises:
        ConfigError: If rng is neither an Rng nor None.
    """
    if rng is None:
        return (None,) * count
    check_rng(rng)
    return rng.split(count)
