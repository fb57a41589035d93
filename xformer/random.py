"""Random numbers from explicit keys: the same `Rng` always draws the same values.

An `Rng` is immutable. Independent streams come from `split` and `fold`, so a value depends on the seed and on the
path to the place where it is drawn, never on what was drawn before. That makes training resumable to the bit
(fold in the step number) and lets rematerialization draw the same dropout again.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import numpy as np

from xformer.backends import Array, Device, Namespace, backend_of, base_namespace
from xformer.backends.backend import RANDOM_BITS
from xformer.errors import ConfigError


@dataclass(frozen=True)
class Rng:
    """A source of random numbers: `Rng(seed)`; the same key draws the same values on one library.

    key: a non-negative integer; save it to save the Rng.

    >>> Rng(0).fold("dropout", 7) == Rng(0).fold("dropout", 7)
    True
    """

    key: int

    def __post_init__(self) -> None:
        if not isinstance(self.key, Integral) or isinstance(self.key, bool) or self.key < 0:
            raise ConfigError(f"seed is {self.key!r}; expected a non-negative integer")
        object.__setattr__(self, "key", int(self.key))

    def fold(self, *labels: int | str) -> Rng:
        """Return the stream named by `labels`, independent of this one and of every other name."""
        # Quotes and escapes keep ("a", "b") apart from "a/b", and 1 from "1".
        names = (repr(label) if isinstance(label, str) else str(int(label)) for label in labels)
        text = f"{self.key:x}/{'/'.join(names)}".encode()
        return Rng(int.from_bytes(hashlib.blake2b(text, digest_size=16).digest(), "little"))

    def split(self, count: int) -> tuple[Rng, ...]:
        """Return `count` independent streams."""
        return tuple(self.fold(index) for index in range(count))

    def generator(self) -> Any:
        """A NumPy generator seeded with this key, for draws on the host."""
        return np.random.Generator(np.random.PCG64DXSM(np.random.SeedSequence(self.key)))

    def permutation(self, count: int) -> list[int]:
        """Return 0 .. count-1 in random order."""
        return self.generator().permutation(count).tolist()  # type: ignore[no-any-return]

    def uniform(self, shape: tuple[int, ...], low: float = 0.0, high: float = 1.0) -> Any:
        """Draw float64 values on the host, uniform in [low, high): the same for every library they move to."""
        return self.generator().uniform(low, high, shape)

    def normal(self, shape: tuple[int, ...], standard_deviation: float = 1.0) -> Any:
        """Draw float64 values on the host, normal around zero: the same for every library they move to."""
        return self.generator().normal(0.0, standard_deviation, shape)

    def bernoulli(
        self, probability: float, shape: tuple[int, ...], xp: Namespace, device: Device = None
    ) -> tuple[Array, float]:
        """Draw booleans, True with (nearly) `probability`, where `xp` keeps its arrays.

        Returns the array and the exact probability that was used: 16 random bits decide each element, so it is a
        multiple of 2**-16. Scaling by the exact one keeps dropout unbiased.
        """
        accepted = max(1, round(probability * 2**RANDOM_BITS)) if probability > 0.0 else 0
        base = base_namespace(xp)
        mask = backend_of(base).bernoulli(base, self.key, accepted, shape, device)
        return mask, accepted / 2**RANDOM_BITS
