"""Operations that ONNX has as a single node."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import spox.opset.ai.onnx.v23 as op
from spox import Var

from xformer.export.onnx_namespace import NAMESPACE, OnnxArray
from xformer.kernels.registry import Kernel, register


def _any(arrays: tuple[Any, ...], static: dict[str, Any]) -> str | None:
    return None


def _kernel(operation: str, forward: Callable[..., OnnxArray]) -> None:
    register(
        Kernel(
            f"onnx.{operation}",
            operation,
            "onnx",
            _any,
            lambda *arrays, save, **static: (forward(*arrays, **static), None),
            None,
        )
    )


def _activation(function: Callable[[Var], Var]) -> Callable[[OnnxArray], OnnxArray]:
    return lambda x: OnnxArray(function(x.var), x.shape, x.dtype)


def _layer_norm(x: OnnxArray, weight: OnnxArray, bias: OnnxArray | None, *, epsilon: float) -> OnnxArray:
    var, _, _ = op.layer_normalization(x.var, weight.var, None if bias is None else bias.var, epsilon=epsilon)
    return OnnxArray(var, x.shape, x.dtype)


def _rms_norm(x: OnnxArray, weight: OnnxArray, *, epsilon: float) -> OnnxArray:
    return OnnxArray(op.rmsnormalization(x.var, weight.var, epsilon=epsilon), x.shape, x.dtype)


def _softmax(x: OnnxArray, mask: OnnxArray | None) -> OnnxArray:
    scores = x if mask is None else NAMESPACE.where(mask, x, -math.inf)
    y = OnnxArray(op.softmax(scores.var, axis=-1), x.shape, x.dtype)
    return y if mask is None else NAMESPACE.where(mask, y, 0.0)  # the softmax of a fully masked row is NaN


_kernel("layer_norm", _layer_norm)
_kernel("rms_norm", _rms_norm)
_kernel("softmax", _softmax)
_kernel("relu", _activation(op.relu))
_kernel("gelu", _activation(op.gelu))
_kernel("gelu_tanh", _activation(lambda x: op.gelu(x, approximate="tanh")))
_kernel("silu", _activation(lambda x: op.mul(x, op.sigmoid(x))))
