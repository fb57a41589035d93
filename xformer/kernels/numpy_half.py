"""Products of 16-bit numbers on NumPy, which has none for bfloat16, and for float16 none that are fast.

What an operation is given is widened, the kernels for float32 do the work, and what it returns is rounded, once.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from xformer.kernels.registry import Kernel, register
from xformer.ops.activations import _gelu
from xformer.ops.attention import _operation as _attention
from xformer.ops.linear import _operation as _linear
from xformer.ops.operation import Operation
from xformer.ops.project_heads import _operation as _project_heads


def _is_half(array: Any) -> bool:
    return array is not None and array.dtype.itemsize == 2 and array.dtype.name in ("float16", "bfloat16")


def _supports(arrays: tuple[Any, ...], static: dict[str, Any]) -> str | None:
    return None if any(map(_is_half, arrays)) else "no array is of float16 or bfloat16"


def _widened(array: Any) -> Any:
    return array.astype(np.float32) if _is_half(array) else array


def _forward(*arrays: Any, save: bool, operation: Operation, **static: Any) -> tuple[Any, Any]:
    dtype = next(array.dtype for array in arrays if _is_half(array))
    wide = tuple(map(_widened, arrays))
    chosen = operation.choose(np, wide, static)
    output, residuals = chosen.forward(*wide, save=save, **static)
    rounded = tuple(y.astype(dtype) for y in output) if isinstance(output, tuple) else output.astype(dtype)
    return rounded, (chosen, residuals)


def _vjp(g: Any, residuals: Any, needs: Any, **static: Any) -> tuple[Any, ...]:
    """The cotangents are those of float32; the sweep rounds them."""
    chosen, kept = residuals
    return chosen.vjp(  # type: ignore[no-any-return]
        [_widened(one) for one in g] if isinstance(g, list | tuple) else _widened(g), kept, needs, **static
    )


for _operation in (_attention, _gelu, _linear, _project_heads):
    _name = _operation.name
    # Sums of cotangents nearly cancel, and then the rounding of each to bfloat16 is a large part of what is left.
    _half_forward = functools.partial(_forward, operation=_operation)
    register(Kernel(f"numpy.half_{_name}", _name, "numpy", _supports, _half_forward, _vjp, tolerance=0.1))
