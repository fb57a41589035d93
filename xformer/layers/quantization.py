"""Weights of linear maps and embeddings in other forms, for inference: quantized or packed."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from xformer import native
from xformer.backends import Array, array_namespace, dtype_name
from xformer.errors import ConfigError
from xformer.layers.adapters import check_no_adapters, map_weights
from xformer.layers.embedding import Embedding
from xformer.layers.linear import Linear
from xformer.ops.blocks import BlockWeight, PackedBlocks
from xformer.ops.weights import (
    QUANTIZED_DTYPES,
    InferenceWeight,
    PackedWeight,
    QuantizedWeight,
    inference_weights,
    quantized_dtype,
)
from xformer.tree import Module, is_array, map_modules, walk, with_fields

AnyModule = TypeVar("AnyModule", bound=Module)


def quantize(module: AnyModule, dtype: str = "int8") -> AnyModule:
    """Return a module for inference whose linear maps and embeddings have weights in 8 or 16 bits.

    Each output feature of a linear map, and each row of an embedding, has its own scale: its largest magnitude is
    127 (Wu et al., 2020, "Integer quantization for deep learning inference", section 3). Other parameters stay in
    float32, and so do inputs, sums and outputs; if the module is also packed, see `pack`. A quantized module cannot be
    trained.

    Decoding is faster than in float32 where products of a few rows read the 8 or 16 bits: on NumPy with the native
    library, and on CuPy up to 16 rows. Other products convert the weight at each call, which saves memory alone. On a
    GPU, long prompts and large batches are fastest after `.to(dtype="bfloat16")`, which also computes in 16 bits.

    Args:
        module: A model or layer; it is not changed.
        dtype: "int8", or "bfloat16" to round weights to 16 bits.

    Raises:
        ConfigError: For another dtype, or if the module is quantized to another one.
        BackendError: If the library has no bfloat16.
    """
    if dtype not in QUANTIZED_DTYPES:
        raise ConfigError(f"dtype is {dtype!r}; expected 'int8' or 'bfloat16'")
    check_no_adapters(module)
    module, current = unpack(module), quantized_dtype(module)
    if current == dtype:
        return module
    if current is not None:
        raise ConfigError(f"the model is quantized to {current}; quantize the original model to {dtype}")

    return map_weights(module.to(dtype="float32"), lambda _, layer, weight: _quantized(layer, weight, dtype))


def _quantized(layer: Module, weight: Any, dtype: str) -> QuantizedWeight:
    is_table = isinstance(layer, Embedding)  # which has a scale for each row
    return QuantizedWeight.quantize(weight, dtype) if is_table else QuantizedWeight.quantize(weight.T, dtype).T


def pack(module: AnyModule, inputs: str | None = None) -> AnyModule:
    """Return a module for inference whose linear maps and embeddings have their weights in panels of 48 columns.

    Products of few rows, as in decoding, read such weights up to twice as fast, with bit-identical results. With int8
    weights, inputs are also quantized, with one scale for each group of 64 features, and integers are multiplied.
    Weights of NumPy in float32, and quantized ones, are packed if the native library is available; others stay as they
    are, such as the blocks of a GGUF file. A packed module cannot be trained. On CuPy, the weights of queries, keys
    and values, and those of gates, become columns of one array, by which one product multiplies.

    Args:
        module: A model or layer; it is not changed.
        inputs: "int8" to quantize also the inputs of maps with the blocks of a GGUF file, with one scale for each group
            of 32 features, so that integers are multiplied. Default: such maps are exact.

    Raises:
        ConfigError: For other inputs, or if the module has neither weights in blocks nor, packed, in int8.
    """
    check_no_adapters(module)
    if inputs not in (None, "int8"):
        raise ConfigError(f"inputs is {inputs!r}; expected 'int8' or None")
    if inputs is not None:
        packed = pack(map_weights(module, lambda _, __, x: PackedBlocks.pack(x) if type(x) is BlockWeight else x))
        kinds = [(type(each), each.quantized_dtype) for each in inference_weights(packed)]
        if (PackedBlocks, None) not in kinds and (PackedWeight, "int8") not in kinds:
            raise ConfigError("inputs is 'int8', but no weight is in the blocks of a GGUF file; use quantize('int8')")
        return packed
    for names in (("query", "key", "value"), ("gate", "up")):
        module = map_modules(functools.partial(_with_joined_maps, names), module)
    if not native.is_available():
        return module

    def convert(_: str, layer: Module, weight: Any) -> Any:
        array = weight.elements if isinstance(weight, InferenceWeight) else weight
        is_float = array_namespace(array).name == "numpy" and dtype_name(weight.dtype) == "float32"
        return weight if _is_packed(weight) or not is_float else _packed(layer, weight)

    return map_weights(module, convert)


def _with_joined_maps(names: tuple[str, ...], layer: Any) -> Any:
    """Return a layer on CuPy with the weights of some linear maps as columns of one array each.

    A kernel then multiplies by all of them at once.
    """
    maps: dict[str, Any] = {name: getattr(layer, name, None) for name in names}
    if not all(type(each) is Linear and is_array(each.weight) for each in maps.values()):
        return layer
    weights, biases = ([getattr(each, name) for each in maps.values()] for name in ("weight", "bias"))
    if array_namespace(*weights).name != "cupy":
        return layer
    biases = columns_of_one(biases) if all(each is not None for each in biases) else biases
    parts = zip(maps.items(), columns_of_one(weights), biases, strict=True)
    return with_fields(layer, **{name: with_fields(each, weight=w, bias=b) for (name, each), w, b in parts})


def columns_of_one(arrays: Sequence[Array]) -> list[Array]:
    """Return copies of arrays that are neighboring columns of one array."""
    joined = array_namespace(*arrays).concat(list(arrays), axis=-1)
    ends = itertools.accumulate(x.shape[-1] for x in arrays)
    return [joined[..., end - x.shape[-1] : end] for x, end in zip(arrays, ends, strict=True)]


def _packed(layer: Module, weight: Any) -> PackedWeight:
    is_table = isinstance(layer, Embedding)  # rows are looked up, and the transpose is multiplied
    return PackedWeight.pack(weight.T).T if is_table else PackedWeight.pack(weight)


def _is_packed(weight: Any) -> bool:
    return isinstance(weight, InferenceWeight) and weight.is_packed


def is_packed(module: Any) -> bool:
    """Return whether `unpack` changes a module."""
    return any(weight.is_packed for weight in inference_weights(module))


def inference_weights_of(
    module: Module, dtype: str | None, *, packed: bool
) -> dict[str, Callable[[Array], InferenceWeight]]:
    """Return the function that quantizes and packs each weight of a linear map or embedding, by parameter name.

    Args:
        module: A float32 module of NumPy in which no two layers share a weight.
        dtype: As for `quantize`; None does not quantize.
        packed: Whether to pack the weights; if True, the native library must be available.
    """
    layers = {id(layer.weight): layer for _, layer in walk(module) if isinstance(layer, Linear | Embedding)}

    def convert(layer: Module, weight: Array) -> Any:
        converted: Any = weight if dtype is None else _quantized(layer, weight, dtype)
        return _packed(layer, converted) if packed else converted

    found = [(name, layers[id(array)]) for name, array in module.named_arrays() if id(array) in layers]
    return {name: functools.partial(convert, layer) for name, layer in found}


def unpack(module: AnyModule) -> AnyModule:
    """Return a module with the weights that `pack` got; those in the blocks of a GGUF file become float32."""
    if not is_packed(module):
        return module
    return map_weights(module, lambda _, layer, weight: weight.unpack() if _is_packed(weight) else weight)
