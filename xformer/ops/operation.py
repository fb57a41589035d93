"""An operation: a portable definition with its VJP, and a name under which kernels may replace it."""

from __future__ import annotations

import functools
from typing import Any

from xformer.autodiff import Implementation, Primitive
from xformer.backends import array_namespace, trace_level
from xformer.kernels import registry


class Operation(Primitive):
    """A primitive that looks for a kernel first (see kernels/registry.py).

    compute_in_float32: whether arrays of 16 bits that no kernel takes are upcast to float32 first, and what comes out is
    rounded once, where the library would widen half-way (see `registry.result_dtype`); the sweep rounds cotangents.
    """

    def __init__(self, portable: Implementation, *, compute_in_float32: bool = False) -> None:
        super().__init__(portable)
        self.compute_in_float32 = compute_in_float32
        registry.OPERATIONS[self.name] = self

    def select(self, xp: Any, arrays: tuple[Any, ...], static: dict[str, Any]) -> Implementation:
        """Pick the kernel that supports the call, else the portable definition; in a trace always that."""
        kernel = None if trace_level(xp) else registry.select(self.name, xp, arrays, static)
        if kernel is None:
            return self._portable(xp, arrays, self.select)
        if registry.should_check(kernel):
            reference = self._portable(xp, arrays, lambda xp, arrays, static: self.portable)
            registry.check(kernel, reference, arrays, static)
        return Implementation(kernel.name, kernel.forward, kernel.vjp)

    def _portable(self, xp: Any, arrays: tuple[Any, ...], choose: Any) -> Implementation:
        """The definition, or where that is to round once, what `choose` picks for upcast arrays, and a rounding."""
        dtype = registry.result_dtype(self.name, xp, arrays)
        if dtype is None:
            return self.portable
        return Implementation(self.name, functools.partial(_forward, _dtype=dtype, _choose=choose), _vjp)


def _forward(*arrays: Any, save: bool, _dtype: Any, _choose: Any, **static: Any) -> tuple[Any, Any]:
    xp = array_namespace(*arrays)
    wide = registry.upcast(xp, arrays)
    chosen = _choose(xp, wide, static)
    output, residuals = chosen.forward(*wide, save=save, **static)
    if isinstance(output, tuple):
        return tuple(xp.astype(y, _dtype) for y in output), (chosen, residuals)
    return xp.astype(output, _dtype), (chosen, residuals)


def _vjp(g: Any, residuals: Any, needs: Any, **static: Any) -> tuple[Any, ...]:
    chosen, kept = residuals
    several = g if isinstance(g, list | tuple) else (g,)
    wide = registry.upcast(array_namespace(*several), several)
    return chosen.vjp(list(wide) if several is g else wide[0], kept, needs, **static)  # type: ignore[no-any-return]
