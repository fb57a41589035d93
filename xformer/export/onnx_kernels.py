"""Operations that ONNX has as a single node.

Attention, RMSNormalization and RotaryEmbedding need opset 23, which fewer versions of onnxruntime and browsers load. On
CPUs they are not faster than the nodes that the portable definitions make.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import spox.opset.ai.onnx.v20 as op
from spox import Var

from xformer.export.onnx_namespace import NAMESPACE, OnnxArray
from xformer.ops import Kernel, register


def _forward(function: Callable[..., OnnxArray]) -> Callable[..., tuple[OnnxArray, None]]:
    return lambda *arrays, save, **static: (function(*arrays, **static), None)


def _activation(function: Callable[[Var], Var]) -> Callable[[OnnxArray], OnnxArray]:
    return lambda x: OnnxArray(function(x.var), x.shape, x.dtype)


def _layer_norm(x: OnnxArray, weight: OnnxArray, bias: OnnxArray | None, *, epsilon: float) -> OnnxArray:
    var, _, _ = op.layer_normalization(x.var, weight.var, None if bias is None else bias.var, epsilon=epsilon)
    return OnnxArray(var, x.shape, x.dtype)


def _softmax(x: OnnxArray, mask: OnnxArray | None) -> OnnxArray:
    scores = x if mask is None else NAMESPACE.where(mask, x, -math.inf)
    y = OnnxArray(op.softmax(scores.var, axis=-1), x.shape, x.dtype)
    return y if mask is None else NAMESPACE.where(mask, y, 0.0)  # the softmax of a fully masked row is NaN


_KERNELS: dict[str, Callable[..., OnnxArray]] = {
    "layer_norm": _layer_norm,
    "softmax": _softmax,
    "relu": _activation(op.relu),
    "gelu": _activation(op.gelu),
    "gelu_tanh": _activation(lambda x: op.gelu(x, approximate="tanh")),
    "silu": _activation(lambda x: op.mul(x, op.sigmoid(x))),
}


def register_kernels() -> None:
    """Let the operations of a traced model be single nodes."""
    for operation, function in _KERNELS.items():
        # Values are compared when the file is verified.
        kernel = Kernel(f"onnx.{operation}", operation, "onnx", _forward(function), None, tolerance=math.inf)
        register(kernel)
