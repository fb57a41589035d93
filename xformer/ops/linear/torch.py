"""Linear maps by `addmm`, which adds the bias within the product."""

from __future__ import annotations

from typing import Any

import torch

from xformer.ops._torch import FLOATS
from xformer.ops.linear.definition import linear_functions
from xformer.ops.operation import Kernel


def _affine(rows: Any, weight: Any, bias: Any) -> Any:
    return rows @ weight if bias is None else torch.addmm(bias, rows, weight)


def _product(rows: Any, weight: Any, addend: Any) -> Any:
    return rows @ weight.mT if addend is None else torch.addmm(addend, rows, weight.mT)


def _parameter_cotangents(rows: Any, g_rows: Any, weight: Any, needs: Any) -> tuple[Any, Any]:
    """Return the gradient of a transposed view (the tied output layer) in the memory order of the view."""
    dweight = None
    if needs[0]:
        dweight = (g_rows.mT @ rows).mT if weight.stride(0) == 1 else rows.mT @ g_rows
    wide = torch.promote_types(g_rows.dtype, torch.float32)
    return dweight, (g_rows.sum(0, dtype=wide) if needs[1] else None)


_FUNCTIONS = linear_functions(_affine, _product, _parameter_cotangents)
_forward, _vjp = _FUNCTIONS["linear"]


def _relu_forward(x: Any, weight: Any, bias: Any, *, save: bool) -> tuple[Any, Any]:
    y = _forward(x, weight, bias, save=save)[0].relu_()
    return y, (x, weight, y)


def _relu_vjp(g: Any, residuals: Any, needs: Any) -> tuple[Any, ...]:
    x, weight, y = residuals
    return _vjp(torch.ops.aten.threshold_backward(g, y, 0.0), (x, weight), needs)


_FUNCTIONS["linear_relu"] = _relu_forward, _relu_vjp
KERNELS = [Kernel(f"torch.{name}", name, "torch", *pair, dtypes=FLOATS) for name, pair in _FUNCTIONS.items()]
