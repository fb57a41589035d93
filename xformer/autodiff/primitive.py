"""Operations with a VJP of their own, which are differentiated as a whole instead of step by step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from xformer.backends import array_namespace, trace_level


class Implementation(NamedTuple):
    """One way to compute an operation and its derivative.

    Attributes:
        name: Name of the implementation.
        forward: forward(*arrays, save, **static) -> (output, residuals). `save` is True if a derivative needs the
            residuals. An operation with several outputs returns a tuple of them.
        vjp: vjp(g, residuals, needs, **static) -> one cotangent per array, which may be None if `needs` is False for
            it. For several outputs g is the list of their cotangents, None for unused ones. `vjp` is None if the
            operation has no derivative.
    """

    name: str
    forward: Callable[..., tuple[Any, Any]]
    vjp: Callable[..., tuple[Any, ...]] | None


class Primitive:
    """A function of arrays with a hand-written VJP; some arrays may be None.

    `portable` is the definition in functions of the Array API. A subclass overrides `select` to use faster
    implementations.
    """

    def __init__(self, portable: Implementation) -> None:
        self.name = portable.name
        self.portable = portable

    def select(self, xp: Any, arrays: tuple[Any, ...], static: dict[str, Any], *, save: bool) -> Implementation:
        """Return the implementation for arrays of `xp`; for a trace, one that is differentiable itself.

        `save` is True if its VJP is needed.
        """
        return self.portable

    def __call__(self, *arrays: Any, **static: Any) -> Any:
        """Compute the operation; in a trace, append one record for all of it."""
        xp = array_namespace(*arrays)
        if trace_level(xp) == 0:
            return self.select(xp, arrays, static, save=False).forward(*arrays, save=False, **static)[0]
        values = tuple(xp.unwrap(array) for array in arrays)
        parents = tuple(xp.position(array) for array in arrays)
        if max(parents) < 0:
            return xp.wrap(self(*values, **static))
        implementation = self.select(xp.base, values, static, save=True)
        if implementation.vjp is None:  # raise before computing, since such operations may work in place
            raise NotImplementedError(f"{self.name} has no derivative; call it outside the differentiated function")
        output, residuals = implementation.forward(*values, save=True, **static)
        needs = tuple(parent >= 0 for parent in parents)
        record = xp.record_outputs if isinstance(output, tuple) else xp.record
        return record(output, _pull, parents, (implementation, residuals, needs, static))


def _pull(xp: Any, g: Any, saved: Any) -> Any:
    implementation, residuals, needs, static = saved
    return implementation.vjp(g, residuals, needs, **static)
