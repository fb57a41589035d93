"""Dropout on CuPy."""

from __future__ import annotations

from typing import Any

from xformer.kernels.cupy.arrays import FLOATS, contiguous, why_not
from xformer.kernels.cupy.elementwise import map_elements
from xformer.ops.operation import Kernel


def _forward(x: Any, mask: Any, *, keep_probability: float, save: bool) -> tuple[Any, Any]:
    mask = contiguous(mask)
    return map_elements("dropout", x, mask, settings=(1.0 / keep_probability,)), mask


def _vjp(g: Any, mask: Any, needs: Any, *, keep_probability: float) -> tuple[Any, ...]:
    return map_elements("dropout", g, mask, settings=(1.0 / keep_probability,)), None


KERNELS = [Kernel("cupy.dropout", "dropout", "cupy", _forward, _vjp, dtypes=FLOATS, why_not=why_not)]
