"""Linear maps by `addmm`, which adds the bias within the product."""

from __future__ import annotations

from typing import Any

import torch

from xformer.ops._torch import FLOATS
from xformer.ops.linear.definition import as_rows, merge_heads, split_heads
from xformer.ops.operation import Kernel


def _affine(rows: Any, weight: Any, bias: Any) -> Any:
    return rows @ weight if bias is None else torch.addmm(bias, rows, weight)


def _forward(x: Any, weight: Any, bias: Any, *, save: bool) -> tuple[Any, Any]:
    y = _affine(as_rows(x), weight, bias)
    return y.view(*x.shape[:-1], weight.shape[1]), (x, weight)


def _vjp(g: Any, residuals: Any, needs: Any) -> tuple[Any, ...]:
    x, weight = residuals
    g_rows = as_rows(g)
    dx = (g_rows @ weight.mT).view(x.shape) if needs[0] else None
    dweight = None
    if needs[1]:
        # The gradient of a transposed view (the tied output layer) has the memory order of the view.
        transposed = weight.stride(0) == 1
        dweight = (g_rows.mT @ as_rows(x)).mT if transposed else as_rows(x).mT @ g_rows
    return dx, dweight, (_sum_rows(g_rows) if needs[2] else None)


def _sum_rows(rows: Any) -> Any:
    """Sum rows in float32 or wider."""
    return rows.sum(0, dtype=torch.promote_types(rows.dtype, torch.float32))


def _relu_forward(x: Any, weight: Any, bias: Any, *, save: bool) -> tuple[Any, Any]:
    y = _forward(x, weight, bias, save=save)[0].relu_()
    return y, (x, weight, y)


def _relu_vjp(g: Any, residuals: Any, needs: Any) -> tuple[Any, ...]:
    x, weight, y = residuals
    return _vjp(torch.ops.aten.threshold_backward(g, y, 0.0), (x, weight), needs)


def _heads_forward(x: Any, *maps: Any, heads: tuple[int, ...], save: bool) -> tuple[Any, Any]:
    weights, biases, rows = maps[::2], maps[1::2], as_rows(x)
    outputs = (_affine(rows, weight, bias) for weight, bias in zip(weights, biases, strict=True))
    return tuple(split_heads(y, x.shape, count) for y, count in zip(outputs, heads, strict=True)), (x, weights)


def _heads_vjp(g: Any, residuals: Any, needs: Any, *, heads: tuple[int, ...]) -> tuple[Any, ...]:
    x, weights = residuals
    rows, dx = as_rows(x), None
    dmaps: list[Any] = [None] * (2 * len(heads))
    for index, (g_heads, weight) in enumerate(zip(g, weights, strict=True)):
        if g_heads is None:
            continue
        g_rows = as_rows(merge_heads(g_heads))
        if needs[0]:
            dx = g_rows @ weight.mT if dx is None else torch.addmm(dx, g_rows, weight.mT)
        if needs[1 + 2 * index]:
            dmaps[2 * index] = rows.mT @ g_rows
        if needs[2 + 2 * index]:
            dmaps[2 * index + 1] = _sum_rows(g_rows)
    return None if dx is None else dx.view(x.shape), *dmaps


_FUNCTIONS: dict[str, tuple[Any, Any]] = {
    "linear": (_forward, _vjp),
    "linear_relu": (_relu_forward, _relu_vjp),
    "project_heads": (_heads_forward, _heads_vjp),
}
KERNELS = [Kernel(f"torch.{name}", name, "torch", *pair, dtypes=FLOATS) for name, pair in _FUNCTIONS.items()]
