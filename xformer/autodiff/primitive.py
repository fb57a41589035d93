"""Operations that are differentiated as a whole, by a VJP of their own, instead of step by step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from xformer.backends import array_namespace, trace_level


class Implementation(NamedTuple):
    """One way to compute an operation and its derivative.

    forward(*arrays, save, **static) -> (output, residuals): `save` says whether residuals will be needed. An
    operation of several outputs returns a tuple of them.
    vjp(g, residuals, needs, **static) -> one cotangent for each array; None is fine where `needs` says False. It is
    None itself where there is no derivative. Of several outputs, g is the list of cotangents, None where unused.
    """

    name: str
    forward: Callable[..., tuple[Any, Any]]
    vjp: Callable[..., tuple[Any, ...]] | None


class Primitive:
    """A function of arrays with a hand-written VJP; some arrays may be None.

    `portable` is the definition, in the Array API alone; `choose` may be overridden to serve faster ones.
    """

    def __init__(self, portable: Implementation) -> None:
        self.name = portable.name
        self.portable = portable

    def select(self, xp: Any, arrays: tuple[Any, ...], static: dict[str, Any]) -> Implementation:
        """Pick the implementation for arrays of `xp`; in a trace, one that is differentiable itself."""
        return self.portable

    def __call__(self, *arrays: Any, **static: Any) -> Any:
        """Compute the operation; under a trace, leave one record for all of it."""
        xp = array_namespace(*arrays)
        if trace_level(xp) == 0:
            return self.select(xp, arrays, static).forward(*arrays, save=False, **static)[0]
        values = tuple(xp.unwrap(array) for array in arrays)
        parents = tuple(xp.position(array) for array in arrays)
        if max(parents) < 0:
            return xp.wrap(self(*values, **static))
        chosen = self.select(xp.base, values, static)
        if chosen.vjp is None:  # before anything is computed, since such operations may work in place
            raise NotImplementedError(f"{self.name} has no derivative; call it outside the differentiated function")
        output, residuals = chosen.forward(*values, save=True, **static)
        needs = tuple(parent >= 0 for parent in parents)
        record = xp.record_several if isinstance(output, tuple) else xp.record
        return record(output, _pull, parents, (chosen, residuals, needs, static))


def _pull(xp: Any, g: Any, saved: Any) -> Any:
    chosen, residuals, needs, static = saved
    return chosen.vjp(g, residuals, needs, **static)
