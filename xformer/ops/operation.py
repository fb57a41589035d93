"""An operation: a portable definition with its VJP, and a name under which kernels may replace it."""

from __future__ import annotations

import functools
from typing import Any

from xformer.autodiff import Implementation, Primitive
from xformer.kernels import registry
from xformer.namespace import array_namespace, trace_level


class Operation(Primitive):
    """A primitive that looks for a kernel first (see kernels/registry.py).

    rounds_once: whether arrays of 16 bits that no kernel takes become float32 first, where the library would widen
    them half-way (see `registry.rounded_dtype`). What comes out is rounded; cotangents are rounded by the sweep.
    """

    def __init__(self, portable: Implementation, *, rounds_once: bool = False) -> None:
        super().__init__(portable)
        registry.OPERATIONS[self.name] = rounds_once
        self._widened = _widened(self.name, self.choose)
        self._reference = _widened(self.name, lambda xp, arrays, static: self.portable)

    def choose(self, xp: Any, arrays: tuple[Any, ...], static: dict[str, Any]) -> Implementation:
        """Pick the kernel that supports the call, else the portable definition; in a trace always that."""
        kernel = None if trace_level(xp) else registry.find(self.name, xp, arrays, static)
        if kernel is None:
            return self._unless_narrow(xp, arrays, self._widened)
        if registry.check_wanted(kernel):
            registry.check(kernel, self._unless_narrow(xp, arrays, self._reference), arrays, static)
        return Implementation(kernel.name, kernel.forward, kernel.vjp)

    def _unless_narrow(self, xp: Any, arrays: tuple[Any, ...], widened: Implementation) -> Implementation:
        return self.portable if registry.rounded_dtype(self.name, xp, arrays) is None else widened


def _widened(name: str, choose: Any) -> Implementation:
    """An implementation that hands float32 arrays to another, the one that `choose` picks for them."""
    return Implementation(f"{name} in float32", functools.partial(_forward, _name=name, _choose=choose), _vjp)


def _forward(*arrays: Any, save: bool, _name: str, _choose: Any, **static: Any) -> tuple[Any, Any]:
    xp = array_namespace(*arrays)
    dtype, wide = registry.rounded_dtype(_name, xp, arrays), registry.widened(xp, arrays)
    chosen = _choose(xp, wide, static)
    output, residuals = chosen.forward(*wide, save=save, **static)
    if isinstance(output, tuple):
        return tuple(xp.astype(y, dtype) for y in output), (chosen, residuals)
    return xp.astype(output, dtype), (chosen, residuals)


def _vjp(g: Any, residuals: Any, needs: Any, **static: Any) -> tuple[Any, ...]:
    chosen, kept = residuals
    several = g if isinstance(g, list | tuple) else (g,)
    wide = registry.widened(array_namespace(*several), several)
    return chosen.vjp(list(wide) if several is g else wide[0], kept, needs, **static)  # type: ignore[no-any-return]
