"""Dropout on NumPy, compiled by numba."""

from __future__ import annotations

from typing import Any

from numba.types import boolean, float32

from xformer.backends.recording import empty
from xformer.ops._numba.compile import compiled_kernel, flatten, in_array, kernel, out_array
from xformer.ops._numba.vector_math import ZERO


@kernel(in_array(1), in_array(1, boolean), float32, out_array(1))
def dropout_kernel(x, mask, scale, y):
    """Compute y = scale x where the mask is True, else 0."""
    for i in range(x.size):
        y[i] = x[i] * scale if mask[i] else ZERO


def _forward(x: Any, mask: Any, *, keep_probability: float, save: bool) -> tuple[Any, Any]:
    y = empty(x.shape, x.dtype)
    dropout_kernel(flatten(x), flatten(mask, bool), 1.0 / keep_probability, y.reshape(-1))
    return y, mask


def _vjp(g: Any, mask: Any, needs: Any, *, keep_probability: float) -> tuple[Any, ...]:
    return _forward(g, mask, keep_probability=keep_probability, save=False)[0], None


KERNELS = [
    compiled_kernel("dropout", _forward, _vjp),
]
