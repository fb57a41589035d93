"""Quantization of the weights of linear maps and embeddings."""

from __future__ import annotations

from typing import Any, TypeVar

from xformer.errors import ConfigError
from xformer.layers.embedding import Embedding
from xformer.layers.linear import Linear
from xformer.ops.quantized import QUANTIZED_DTYPES, QuantizedWeight, quantized_dtype
from xformer.tree import Module, map_modules, with_fields

AnyModule = TypeVar("AnyModule", bound=Module)


def quantize(module: AnyModule, dtype: str = "int8") -> AnyModule:
    """Return a module for inference whose linear maps and embeddings have weights in 8 or 16 bits.

    Each output feature of a linear map, and each row of an embedding, has a scale of its own: its largest magnitude is
    127 (Wu et al., 2020, "Integer quantization for deep learning inference", section 3). Other parameters stay in
    float32, and so do inputs, sums and outputs. A quantized module cannot be trained.

    Args:
        module: A model or layer; it is not changed.
        dtype: "int8", or "bfloat16" to round weights to 16 bits.

    Raises:
        ConfigError: For another dtype, or if the module is quantized to another one.
        BackendError: If the library has no bfloat16.
    """
    if dtype not in QUANTIZED_DTYPES:
        raise ConfigError(f"dtype is {dtype!r}; expected 'int8' or 'bfloat16'")
    current = quantized_dtype(module)
    if current == dtype:
        return module
    if current is not None:
        raise ConfigError(f"the model is quantized to {current}; quantize the original model to {dtype}")

    def quantize_layer(layer: Module) -> Module:
        weight: Any
        if isinstance(layer, Linear):
            weight = QuantizedWeight.quantize(layer.weight.T, dtype).T  # type: ignore[arg-type]
        elif isinstance(layer, Embedding):
            weight = QuantizedWeight.quantize(layer.weight, dtype)  # type: ignore[arg-type]
        else:
            return layer
        return with_fields(layer, weight=weight)

    quantized: AnyModule = map_modules(quantize_layer, module.to(dtype="float32"))
    return quantized
