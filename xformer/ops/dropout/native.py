"""Dropout on NumPy by the native library."""

from __future__ import annotations

from typing import Any

import numpy as np

from xformer import native
from xformer.ops._native import native_kernel


def _forward(x: Any, mask: Any, *, keep_probability: float, save: bool) -> tuple[Any, Any]:
    y = np.empty(x.shape, x.dtype)
    native.call("dropout", (native.contiguous(x), native.contiguous(mask), y), n0=1.0 / keep_probability)
    return y, mask


def _vjp(g: Any, mask: Any, needs: Any, *, keep_probability: float) -> tuple[Any, ...]:
    return _forward(g, mask, keep_probability=keep_probability, save=False)[0], None


KERNELS = [native_kernel("dropout", _forward, _vjp)]
