"""Random numbers from explicit keys: the same `Rng` always draws the same values.

An `Rng` is immutable. Independent streams come from `split` and `fold`, so a value depends on the seed and on the
path to the place where it is drawn, never on what was drawn before. That makes training resumable to the bit
(fold in the step number) and lets rematerialization draw the same dropout again.
"""

from __future__ import annotations

import hashlib
import importlib
import math
from dataclasses import dataclass
from numbers import Integral
from typing import Any

from xformer.backends import Array, Device, Namespace, backend_name, base_namespace, from_host
from xformer.errors import ConfigError
from xformer.kernels.cupy import launch as cuda_launch

_SIXTEEN_BITS = 65536
_THREADS, _AT_ONCE, _MOST_BLOCKS = 256, 8, 2**20  # of the kernel: a block's threads, elements that one draws, blocks


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
        numpy_random = importlib.import_module("numpy").random
        return numpy_random.Generator(numpy_random.PCG64DXSM(numpy_random.SeedSequence(self.key)))

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
        accepted = max(1, round(probability * _SIXTEEN_BITS)) if probability > 0.0 else 0
        base = base_namespace(xp)
        mask = _MASKS.get(backend_name(base), Rng._mask)(self, base, shape, accepted, device)
        return mask, accepted / _SIXTEEN_BITS

    def _mask(self, xp: Namespace, shape: tuple[int, ...], accepted: int, device: Device) -> Array:
        """Drawn on the host: what a library has unless it is in the table below."""
        return from_host(xp, self._bits(shape) < accepted, device=device)

    def _bits(self, shape: tuple[int, ...]) -> Any:
        """Sixteen random bits an element; whole 64-bit words are drawn, four elements from each."""
        numpy = importlib.import_module("numpy")
        count = math.prod(shape)
        # Dropout draws millions of these a step: SFC64 is twice as fast as the generator for everything else, and
        # integers() over the full range hands out raw words and, unlike random_raw(), lets other threads run.
        generator = numpy.random.Generator(numpy.random.SFC64(numpy.random.SeedSequence(self.key)))
        words = generator.integers(0, 2**64 - 1, -(-count // 4), dtype=numpy.uint64, endpoint=True)
        return words.view(numpy.uint16)[:count].reshape(shape)

    def _mask_torch(self, xp: Namespace, shape: tuple[int, ...], accepted: int, device: Device) -> Any:
        torch = importlib.import_module("torch")
        place = torch.device(device or "cpu")
        if place.type == "cpu":
            # torch's generator on the CPU takes no more than 32 bits of the key; NumPy's takes all.
            return self._mask(xp, shape, accepted, device)
        generator = torch.Generator(device=place).manual_seed(self.key % 2**63)
        return torch.randint(0, _SIXTEEN_BITS, shape, generator=generator, device=place, dtype=torch.int32) < accepted

    def _mask_cupy(self, xp: Namespace, shape: tuple[int, ...], accepted: int, device: Device) -> Any:
        """By a kernel that writes nothing but the mask.

        CuPy's generators begin with a state for each thread of the GPU, and draw integers that take four times as much
        memory.
        """
        mask = xp.empty(shape, dtype=xp.bool)
        blocks = min(_MOST_BLOCKS, -(-mask.size // (_AT_ONCE * _THREADS)))
        words = (self.key >> 32 * place & 0xFFFFFFFF for place in range(4))
        cuda_launch.launch("random.keep", ("bool",), blocks, _THREADS, mask, mask.size, accepted, *words)
        return mask

    def _mask_jax(self, xp: Namespace, shape: tuple[int, ...], accepted: int, device: Device) -> Any:
        jax = importlib.import_module("jax")
        key = jax.random.fold_in(jax.random.key(self.key % 2**31), self.key // 2**31 % 2**31)
        return jax.random.randint(key, shape, 0, _SIXTEEN_BITS, dtype="int32") < accepted


_MASKS = {"torch": Rng._mask_torch, "cupy": Rng._mask_cupy, "jax": Rng._mask_jax}
