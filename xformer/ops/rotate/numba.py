"""Rotation of pairs of features on NumPy, compiled by numba."""

from __future__ import annotations

import math
from typing import Any

from xformer.backends.recording import contiguous, empty
from xformer.ops._numba.compile import compiled_kernel, in_array, kernel, out_array


@kernel(in_array(3), in_array(2), in_array(2), out_array(3))
def rotate_kernel(x, cosine, sine, y):
    """Rotate features j and j + half of x, (heads, length, features); copy features beyond 2 half."""
    half = cosine.shape[1]
    for i in range(x.shape[0]):
        for t in range(x.shape[1]):
            row, cos, sin, out = x[i, t], cosine[t], sine[t], y[i, t]
            first, second, out_first, out_second = row[:half], row[half:], out[:half], out[half:]
            for j in range(half):
                out_first[j] = first[j] * cos[j] - second[j] * sin[j]
                out_second[j] = second[j] * cos[j] + first[j] * sin[j]
            for j in range(2 * half, row.size):
                out[j] = row[j]


def _forward(x: Any, cosine: Any, sine: Any, *, save: bool) -> tuple[Any, Any]:
    y = empty(x.shape, x.dtype)
    shape = (math.prod(x.shape[:-2]), *x.shape[-2:])
    rotate_kernel(contiguous(x).reshape(shape), contiguous(cosine), contiguous(sine), y.reshape(shape))
    return y, (cosine, sine)


def _vjp(g: Any, residuals: Any, needs: Any) -> tuple[Any, ...]:
    cosine, sine = residuals
    return _forward(g, cosine, -sine, save=False)[0], None, None


KERNELS = [
    compiled_kernel("rotate", _forward, _vjp),
]
