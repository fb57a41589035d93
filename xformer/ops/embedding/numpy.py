"""Embedding on NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np

from xformer.ops._numpy import FLOATS
from xformer.ops.linear.definition import as_rows
from xformer.ops.operation import Kernel


def _forward(weight: Any, ids: Any, *, scale: float, save: bool) -> tuple[Any, Any]:
    y = weight.take(ids, axis=0)
    if scale != 1.0:
        y *= scale
    return y, (ids, weight)


def _vjp(g: Any, residuals: Any, needs: Any, *, scale: float) -> tuple[Any, ...]:
    ids, weight = residuals
    dweight = np.zeros_like(weight)
    _add_rows(dweight, ids.reshape(-1), as_rows(g if scale == 1.0 else g * scale))
    return dweight, None


def _add_rows(target: Any, ids: Any, rows: Any) -> None:
    """Add rows[i] to target[ids[i]]; sorting makes the rows of one id neighbors, so that one pass sums them."""
    if ids.size:
        order = ids.argsort(kind="stable")
        sorted_ids = ids[order]
        starts = np.flatnonzero(np.concatenate(([True], sorted_ids[1:] != sorted_ids[:-1])))
        target[sorted_ids[starts]] = np.add.reduceat(rows[order], starts, axis=0)


KERNELS = [Kernel("numpy.embedding", "embedding", "numpy", _forward, _vjp, dtypes=FLOATS)]
