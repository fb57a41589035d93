"""Activation functions and dropout."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from xformer.kernels.registry import Kernel, register
from xformer.kernels.torch.arrays import supports_floats

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


def _register(operation: str, forward: Callable[..., Any], backward: Callable[[Any, Any], Any]) -> None:
    vjp = functools.partial(_vjp, backward=backward)
    register(Kernel(f"torch.{operation}", operation, "torch", supports_floats, forward, vjp))


_register("relu", _relu_forward, lambda g, y: _aten.threshold_backward(g, y, 0.0))
_register("silu", functools.partial(_forward, function=_functional.silu), _aten.silu_backward)
_register("gelu", _gelu_forward, _gelu_backward)
_register(
    "gelu_tanh",
    functools.partial(_forward, function=functools.partial(_functional.gelu, approximate="tanh")),
    functools.partial(_aten.gelu_backward, approximate="tanh"),
)


def _dropout_forward(x: Any, mask: Any, *, keep_probability: float, save: bool) -> tuple[Any, Any]:
    return (x * (1.0 / keep_probability)).masked_fill(~mask, 0.0), mask


def _dropout_vjp(g: Any, mask: Any, needs: Any, *, keep_probability: float) -> tuple[Any, ...]:
    return _dropout_forward(g, mask, keep_probability=keep_probability, save=False)[0], None


def _dropout_supports(arrays: tuple[Any, ...], static: dict[str, Any]) -> str | None:
    x, mask = arrays
    return None if x.shape == mask.shape else "the mask is broadcast"


register(Kernel("torch.dropout", "dropout", "torch", _dropout_supports, _dropout_forward, _dropout_vjp))
