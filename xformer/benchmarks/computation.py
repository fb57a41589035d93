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

_NUM_SAMPLES = 7  # values of each array in its fingerprint


def _no_fingerprint(result: Any) -> list[Any]:
    return []


@dataclass(frozen=True)
class Computation:
    """A computation that can be repeated.

    Args:
        step: Called with the index of the step; computes it and waits for the result.
        fingerprint: Maps a result to a few numbers, which must be the same for all implementations.
        metadata: Further facts for the results, such as the number of parameters.
        context: Returns a context manager that is entered once, before the first step.
    """

    step: Callable[[int], Any]
    fingerprint: Callable[[Any], list[Any]] = _no_fingerprint
    metadata: dict[str, Any] = field(default_factory=dict)
    context: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext


class Backend:
    """An array library in its fastest mode: compiled by JAX, in torch's inference mode.

    Args:
        name: Name of the backend.
        dtype: Name of the floating-point dtype.

    Raises:
        BackendError: If the library is unknown or not installed.
    """

    def __init__(self, name: str, dtype: str = "float32") -> None:
        self.name, self.dtype = name, dtype
        self.xp: Namespace = resolve(name)

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
        run = self._jit(function, arguments) if self.name == "jax" else lambda: function(*arguments)

        def step(index: int) -> Any:
            result = run()
            self._synchronize(result)
            return result

        context: Callable[[], Any] = contextlib.nullcontext
        if self.name == "torch":
            context = importlib.import_module("torch").inference_mode
        return Computation(step, fingerprint, metadata or {}, context)

    def _jit(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Callable[[], Any]:
        leaves, rebuild = flatten(arguments)
        compiled = importlib.import_module("jax").jit(lambda leaves: flatten(function(*rebuild(leaves)))[0])
        return lambda: compiled(leaves)

    def _synchronize(self, result: Any) -> None:
        if self.name == "jax":
            importlib.import_module("jax").block_until_ready(result)
        elif self.name == "cupy":
            importlib.import_module("cupy").cuda.Device().synchronize()


def fingerprint(result: Any) -> list[float]:
    """Return the mean absolute value of each array of a result and a few evenly spaced elements."""
    values: list[float] = []
    for array in flatten(result)[0]:
        host = to_host(array).astype("float64").reshape(-1)
        indices = [index * (host.shape[0] - 1) // (_NUM_SAMPLES - 1) for index in range(_NUM_SAMPLES)]
        values += [float(np.mean(np.abs(host))), *(float(host[index]) for index in indices)]
    return values
