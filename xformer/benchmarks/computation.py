"""Computations that benchmarks repeat, and the array library that runs them."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from xformer.backends import Namespace, from_host, resolve, to_host
from xformer.benchmarks.interleaved import dtype_of
from xformer.tree import flatten

_NUM_SAMPLES = 4096  # elements of each array in its fingerprint
_EAGER = ("numpy", "cupy", "torch", "array_api_strict")
_COMPILERS = {"jax": ("jax", "jit", "block_until_ready"), "mlx": ("mlx.core", "compile", "eval")}


@dataclass(frozen=True)
class Computation:
    """A computation that can be repeated.

    Args:
        step: Called with the index of the step; computes it, or only enqueues it if there is a `wait`.
        fingerprint: Maps a result to a list of numbers for each of its arrays, to compare implementations.
        metadata: Further facts for the results, such as the number of parameters.
        context: Returns a context manager that is entered once, before the first step.
        wait: Called with a result; returns when it and all earlier ones are computed.
    """

    step: Callable[[int], Any]
    fingerprint: Callable[[Any], list[Any]] = lambda result: []
    metadata: dict[str, Any] = field(default_factory=dict)
    context: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    wait: Callable[[Any], None] | None = None


class Backend:
    """An array library in its fastest mode: compiled by JAX and MLX, in torch's inference mode.

    The results of a library that may be lazy are read in each step, so that they are computed.

    Args:
        name: Name of the backend, or the backend.
        dtype: Name of the floating-point dtype.

    Raises:
        BackendError: If the library is unknown or not installed.
    """

    def __init__(self, name: Any, dtype: str = "float32") -> None:
        self.xp: Namespace = resolve(name)
        self.name, self.dtype = self.xp.name, dtype
        self.wait: Callable[[Any], None] | None = _wait_for_gpu if self.name == "cupy" else None

    @classmethod
    def from_settings(cls, settings: dict[str, Any]) -> Backend:
        """Return the backend named by settings["backend"], with settings["dtype"] (default float32)."""
        return cls(settings["backend"], dtype_of(settings))

    def array(self, host: Any) -> Any:
        """Copy a NumPy array to this library and cast floating-point numbers to its dtype; None stays None."""
        return None if host is None else from_host(self.xp, host, dtype=self.dtype if host.dtype.kind == "f" else None)

    def computation(
        self, function: Callable[..., Any], *arguments: Any, metadata: dict[str, Any] | None = None
    ) -> Computation:
        """Return the computation that calls a function of arrays and modules; the function returns arrays."""
        context: Callable[[], Any] = contextlib.nullcontext
        if self.name == "torch":
            context = importlib.import_module("torch").inference_mode
        run = self._run(function, arguments)
        return Computation(lambda index: run(), fingerprint, metadata or {}, context, self.wait)

    def _run(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Callable[[], Any]:
        """Return a function that computes the results, or on CuPy only enqueues them."""
        if self.name in _EAGER:
            return lambda: function(*arguments)
        if self.name not in _COMPILERS:
            return lambda: [to_host(array) for array in flatten(function(*arguments))[0]]
        module, jit, block = _COMPILERS[self.name]
        library = importlib.import_module(module)
        leaves, rebuild = flatten(arguments)
        compiled = getattr(library, jit)(lambda leaves: flatten(function(*rebuild(leaves)))[0])

        def run() -> Any:
            results = compiled(leaves)
            getattr(library, block)(results)
            return results

        return run


def _wait_for_gpu(result: Any) -> None:
    importlib.import_module("cupy").cuda.Device().synchronize()


def fingerprint(result: Any) -> list[list[float]]:
    """Return elements of each array of a result: all, or of a large array a random sample, the same in every call."""
    samples = []
    for array in flatten(result)[0]:
        host = to_host(array).reshape(-1)
        if host.size > _NUM_SAMPLES:
            host = host[np.random.default_rng(0).integers(host.size, size=_NUM_SAMPLES)]
        samples.append(host.astype("float64").tolist())
    return samples
