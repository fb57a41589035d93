"""Operations: portable definitions with a VJP, which kernels may replace."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from xformer.autodiff import Implementation, Primitive
from xformer.backends import array_namespace, trace_level
from xformer.backends.recording import NAMESPACE
from xformer.kernels import registry
from xformer.kernels.recording import recorded_kernel


class Operation(Primitive):
    """A primitive whose calls run a kernel, if one supports them (see README.md in this folder)."""

    def __init__(
        self,
        name: str,
        forward: Callable[..., tuple[Any, Any]],
        vjp: Callable[..., tuple[Any, ...]] | None,
        *,
        compute_in_float32: bool = False,
    ) -> None:
        """Register the operation.

        Args:
            name: Unique name.
            forward: Portable definition in the Array API (see `Implementation`).
            vjp: Its derivative, or None.
            compute_in_float32: Whether float16 and bfloat16 arrays that no kernel takes are computed in float32, and
                the output rounded once, on libraries that would otherwise change the dtype midway.
        """
        super().__init__(Implementation(name, forward, vjp))
        self.compute_in_float32 = compute_in_float32
        registry.OPERATIONS[name] = self

    def select(self, xp: Any, arrays: tuple[Any, ...], static: dict[str, Any], *, save: bool) -> Implementation:
        """Return the kernel with the highest priority that supports the call, else the portable definition.

        Arrays of an outer trace always get the portable definition, which can be differentiated again.
        """
        kernel = None if trace_level(xp) else registry.select(self.name, xp, arrays, static, save=save)
        if kernel is None:
            return self._portable(xp, arrays, self.select)
        if xp is NAMESPACE:
            return recorded_kernel(kernel)
        if registry.should_check(kernel):
            reference = self._portable(xp, arrays, lambda *_, save: self.portable)
            registry.check(kernel, reference, arrays, static)
        return Implementation(kernel.name, kernel.forward, kernel.vjp)

    def _portable(self, xp: Any, arrays: tuple[Any, ...], select: Callable[..., Implementation]) -> Implementation:
        """Return the definition, or, for half precision, what `select` returns for upcast arrays and a rounding."""
        dtype = registry.result_dtype(self.name, xp, arrays)
        if dtype is None:
            return self.portable
        return Implementation(self.name, functools.partial(_upcast_forward, _dtype=dtype, _select=select), _upcast_vjp)


def _upcast_forward(*arrays: Any, save: bool, _dtype: Any, _select: Any, **static: Any) -> tuple[Any, Any]:
    xp = array_namespace(*arrays)
    arrays = registry.upcast(xp, arrays)
    selected = _select(xp, arrays, static, save=save)
    output, residuals = selected.forward(*arrays, save=save, **static)
    if isinstance(output, tuple):
        return tuple(xp.astype(y, _dtype) for y in output), (selected, residuals)
    return xp.astype(output, _dtype), (selected, residuals)


def _upcast_vjp(g: Any, residuals: Any, needs: Any, **static: Any) -> tuple[Any, ...]:
    selected, residuals = residuals
    cotangents = g if isinstance(g, list | tuple) else (g,)
    upcast = registry.upcast(array_namespace(*cotangents), cotangents)
    g = list(upcast) if cotangents is g else upcast[0]
    return selected.vjp(g, residuals, needs, **static)
