"""Many arrays in another floating dtype: what mixed precision begins and ends with."""

from __future__ import annotations

from typing import Any

from xformer.autodiff import Implementation
from xformer.backends import Array, array_namespace, dtype_named
from xformer.ops.operation import Operation


def _forward(*arrays: Array, dtype: str, save: bool) -> tuple[tuple[Array, ...], Any]:
    xp = array_namespace(*arrays)
    wanted = dtype_named(xp, dtype)
    return tuple(xp.astype(x, wanted) for x in arrays), None


def _vjp(g: Any, residuals: Any, needs: Any, *, dtype: str) -> tuple[Any, ...]:
    return tuple(g)  # the sweep gives a cotangent the dtype of what it belongs to


_operation = Operation(Implementation("cast", _forward, _vjp))


def cast(*arrays: Array, dtype: str) -> tuple[Array, ...]:
    """Bring floating arrays, of any shapes, to one floating dtype, as new arrays."""
    return _operation(*arrays, dtype=dtype) if arrays else ()
