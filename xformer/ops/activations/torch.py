"""Activation functions of torch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from xformer.ops._torch import FLOATS
from xformer.ops.operation import Kernel

_aten, _functional = torch.ops.aten, torch.nn.functional


def _forward(x: Any, *, save: bool, function: Callable[[Any], Any]) -> tuple[Any, Any]:
    return function(x), x


def _vjp(g: Any, x: Any, needs: Any, *, backward: Callable[[Any, Any], Any]) -> tuple[Any, ...]:
    return (backward(g, x),)


def _relu_forward(x: Any, *, save: bool) -> tuple[Any, Any]:
    y = torch.relu(x)
    return y, y


_MAX_ABS = 40.0  # beyond, the tail of the normal distribution is zero; infinity times zero would be NaN


def _gelu_forward(x: Any, *, save: bool) -> tuple[Any, Any]:
    clamped = x.clamp(min=-_MAX_ABS)
    return _functional.gelu(clamped), clamped


def _gelu_backward(g: Any, x: Any) -> Any:
    return _aten.gelu_backward(g, x.clamp(max=_MAX_ABS))


def _kernel(operation: str, forward: Callable[..., Any], backward: Callable[[Any, Any], Any]) -> Kernel:
    vjp = functools.partial(_vjp, backward=backward)
    return Kernel(f"torch.{operation}", operation, "torch", forward, vjp, dtypes=FLOATS)


KERNELS = [
    _kernel("relu", _relu_forward, lambda g, y: _aten.threshold_backward(g, y, 0.0)),
    _kernel("silu", functools.partial(_forward, function=_functional.silu), _aten.silu_backward),
    _kernel("gelu", _gelu_forward, _gelu_backward),
    _kernel(
        "gelu_tanh",
        functools.partial(_forward, function=functools.partial(_functional.gelu, approximate="tanh")),
        functools.partial(_aten.gelu_backward, approximate="tanh"),
    ),
]
