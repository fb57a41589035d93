"""Operations that ONNX has as a single node.

Attention, RMSNormalization and RotaryEmbedding need opset 23, which fewer versions of onnxruntime and browsers load. On
CPUs they are not faster than the nodes that the portable definitions make.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import spox.opset.ai.onnx.v20 as op
from spox import Var

from xformer.export.onnx_namespace import NAMESPACE, traced, var_of
from xformer.ops import Kernel, register
from xformer.tracing.tracer import Tracer


def _forward(function: Callable[..., Tracer]) -> Callable[..., tuple[Tracer, None]]:
    return lambda *arrays, save, **static: (function(*arrays, **static), None)


def _activation(function: Callable[[Var], Var]) -> Callable[[Tracer], Tracer]:
    return lambda x: traced(function(var_of(x)), x.shape, x.dtype)


def _layer_norm(x: Tracer, weight: Tracer, bias: Tracer | None, *, epsilon: float) -> Tracer:
    scale, shift = var_of(weight), None if bias is None else var_of(bias)
    var, _, _ = op.layer_normalization(var_of(x), scale, shift, epsilon=epsilon)
    return traced(var, x.shape, x.dtype)


def _softmax(x: Tracer, mask: Tracer | None) -> Tracer:
    scores = x if mask is None else NAMESPACE.where(mask, x, -math.inf)
    y = traced(op.softmax(var_of(scores), axis=-1), x.shape, x.dtype)
    return y if mask is None else NAMESPACE.where(mask, y, 0.0)  # the softmax of a fully masked row is NaN


_KERNELS: dict[str, Callable[..., Tracer]] = {
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
