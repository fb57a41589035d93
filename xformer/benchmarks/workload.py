"""What a contender does, and the array library that it does it with."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from xformer.backends import Array, Namespace, array_namespace, from_host, resolve, to_host
from xformer.benchmarks.interleaved import dtype_of
from xformer.tree import flatten

_SAMPLES = 7  # values of each array that contenders must agree on


def _no_answer(result: Any) -> list[Any]:
    return []


@dataclass(frozen=True)
class Work:
    """Work that can be done again and again.

    step: does it once and waits for the result, given the number of the step. digest: a few numbers that tell whether
    a result is right. facts: what tables should know, such as the number of parameters. around: entered once, before
    the first step.
    """

    step: Callable[[int], Any]
    digest: Callable[[Any], list[Any]] = _no_answer
    facts: dict[str, Any] = field(default_factory=dict)
    around: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext


class Library:
    """An array library at its best: compiled where it compiles, without its own autograd, waited for.

    dtype: of floating-point numbers. Raises BackendError where the library is unknown or not installed.
    """

    def __init__(self, name: str, dtype: str = "float32") -> None:
        self.name, self.dtype = name, dtype
        self.xp: Namespace = resolve(name)

    @classmethod
    def of(cls, settings: dict[str, Any]) -> Library:
        """The one that a contender is told: settings["backend"], and "dtype" where it is not float32."""
        return cls(settings["backend"], dtype_of(settings))

    def array(self, host: Any) -> Array:
        """A NumPy array in this library, floating-point numbers in its dtype; None stays None."""
        return None if host is None else from_host(self.xp, host, dtype=self.dtype if host.dtype.kind == "f" else None)

    def work(self, function: Callable[..., Any], *arguments: Any, facts: dict[str, Any] | None = None) -> Work:
        """The work of calling a function of arrays and modules, which returns arrays."""
        run = self._compiled(function, arguments) if self.name == "jax" else lambda: function(*arguments)

        def step(number: int) -> Any:
            result = run()
            self._wait(result)
            return result

        around: Callable[[], Any] = contextlib.nullcontext
        if self.name == "torch":
            around = importlib.import_module("torch").inference_mode
        return Work(step, digest, facts or {}, around)

    def _compiled(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Callable[[], Any]:
        """The function by jax.jit, which knows arrays but no modules."""
        leaves, rebuild = flatten(arguments)
        compiled = importlib.import_module("jax").jit(lambda leaves: flatten(function(*rebuild(leaves)))[0])
        return lambda: compiled(leaves)

    def _wait(self, result: Any) -> None:
        if self.name == "jax":
            importlib.import_module("jax").block_until_ready(result)
        elif self.name == "cupy":
            importlib.import_module("cupy").cuda.Device().synchronize()


def digest(result: Any) -> list[float]:
    """Of each array of a result its mean size, and values from all over it."""
    found: list[float] = []
    for array in flatten(result)[0]:
        host = to_host(array).astype("float64").reshape(-1)
        xp = array_namespace(host)
        places = [place * (host.shape[0] - 1) // (_SAMPLES - 1) for place in range(_SAMPLES)]
        found += [float(xp.mean(xp.abs(host))), *(float(host[place]) for place in places)]
    return found
