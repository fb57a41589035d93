"""Rotation of pairs of features on NumPy by the native library."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from xformer import native
from xformer.ops._native import native_kernel


def _rotate(x: Any, cosine: Any, sine: Any, *, is_inverse: bool) -> Any:
    y, shape = np.empty(x.shape, x.dtype), (math.prod(x.shape[:-2]), *x.shape[-2:])
    arrays = native.contiguous(x).reshape(shape), native.contiguous(cosine), native.contiguous(sine), y.reshape(shape)
    native.call("rotate", arrays, is_inverse)
    return y


def _forward(x: Any, cosine: Any, sine: Any, *, save: bool) -> tuple[Any, Any]:
    return _rotate(x, cosine, sine, is_inverse=False), (cosine, sine)


def _vjp(g: Any, residuals: Any, needs: Any) -> tuple[Any, ...]:
    return _rotate(g, *residuals, is_inverse=True), None, None


KERNELS = [native_kernel("rotate", _forward, _vjp)]
