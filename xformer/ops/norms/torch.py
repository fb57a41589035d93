"""Layer norm and RMS norm on torch."""

from __future__ import annotations

from typing import Any

import torch

from xformer.ops._torch import WIDE_FLOATS
from xformer.ops.operation import Kernel


def _layer_norm_forward(x: Any, weight: Any, bias: Any, *, epsilon: float, save: bool) -> tuple[Any, Any]:
    if not save:
        return torch.nn.functional.layer_norm(x, weight.shape, weight, bias, epsilon), None
    y, mean, inverse = torch.native_layer_norm(x, weight.shape, weight, bias, epsilon)
    return y, (x, mean, inverse, weight, bias)


def _layer_norm_vjp(g: Any, residuals: Any, needs: Any, *, epsilon: float) -> tuple[Any, ...]:
    x, mean, inverse, weight, bias = residuals
    return torch.ops.aten.native_layer_norm_backward(g, x, weight.shape, mean, inverse, weight, bias, needs)


def _rms_norm_forward(x: Any, weight: Any, *, epsilon: float, save: bool) -> tuple[Any, Any]:
    return torch.nn.functional.rms_norm(x, weight.shape, weight, epsilon), None


def _why_not(*arrays: Any, save: bool, **options: Any) -> str | None:
    return "torch has its derivative for some devices only" if save else None


# The definition scales rows of float16 and bfloat16, so that their squares do not overflow.

KERNELS = [
    Kernel("torch.layer_norm", "layer_norm", "torch", _layer_norm_forward, _layer_norm_vjp, dtypes=WIDE_FLOATS),
    Kernel("torch.rms_norm", "rms_norm", "torch", _rms_norm_forward, None, dtypes=WIDE_FLOATS, why_not=_why_not),
]
