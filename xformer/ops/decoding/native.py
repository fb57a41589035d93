"""Largest scores, and the logarithm of the sum of exponentials, on NumPy by the native library."""

from __future__ import annotations

from typing import Any

import numpy as np

from xformer import native
from xformer.ops._native import native_kernel, rows_of, why_not

_MAX_K = 256  # values are inserted one by one; more are sorted faster


def _logsumexp(x: Any, *, save: bool) -> tuple[tuple[Any, Any], Any]:
    """Take the statistics of a cross-entropy: the largest element, and the sum of exponentials relative to it."""
    rows = rows_of(x)
    losses, statistics = np.empty(len(rows), x.dtype), np.empty((2, len(rows)), x.dtype)
    native.call("cross_entropy", (rows, np.zeros(len(rows), np.int64), losses, statistics), -1, n0=0.0, n1=0.0)
    shape = (*x.shape[:-1], 1)
    return (statistics[0].reshape(shape), np.log(statistics[1]).reshape(shape)), None


def _top_k(x: Any, *, k: int, save: bool) -> tuple[Any, Any]:
    rows, shape = rows_of(x), (*x.shape[:-1], k)
    values, indices = np.empty((len(rows), k), x.dtype), np.empty((len(rows), k), np.int64)
    native.call("top_k", (rows, values, indices))
    return (values.reshape(shape), indices.reshape(shape)), None


def _why_not_top_k(x: Any, *, k: int, save: bool) -> str | None:
    return why_not(x) if 1 <= k <= min(_MAX_K, x.shape[-1]) else f"k is {k}; expected 1 to {_MAX_K}"


KERNELS = [
    native_kernel("logsumexp", _logsumexp, None, is_recordable=False),
    native_kernel("top_k", _top_k, None, why_not=_why_not_top_k),
]
