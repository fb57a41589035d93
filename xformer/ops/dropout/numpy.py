"""Dropout on NumPy."""

from __future__ import annotations

from typing import Any

from xformer.ops._numpy import FLOATS, masked
from xformer.ops.operation import Kernel


def _forward(x: Any, mask: Any, *, keep_probability: float, save: bool) -> tuple[Any, Any]:
    y = masked(mask, x)
    y *= 1.0 / keep_probability
    return y, mask


def _vjp(g: Any, mask: Any, needs: Any, *, keep_probability: float) -> tuple[Any, ...]:
    return _forward(g, mask, keep_probability=keep_probability, save=False)[0], None


KERNELS = [Kernel("numpy.dropout", "dropout", "numpy", _forward, _vjp, dtypes=FLOATS)]
