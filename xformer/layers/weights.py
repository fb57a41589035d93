"""Models whose linear maps and embeddings have weights in other forms: with adapters, quantized or packed.

Adapters are those of Hu et al. (2021, "LoRA: Low-rank adaptation of large language models"), also with learned
magnitudes (Liu et al., 2024, "DoRA: Weight-decomposed low-rank adaptation").
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeVar

from xformer import native, tree
from xformer.backends import Array, array_namespace, device, dtype_name, extra, is_half_precision
from xformer.config import check_bool, check_count, check_number
from xformer.errors import ConfigError, check_arguments, describe_type, nearest_hint
from xformer.layers.basic import Initializer, Linear
from xformer.layers.embedding import Embedding
from xformer.ops import weights as formats
from xformer.ops.blocks import BlockWeight, PackedBlocks
from xformer.ops.linear import linear
from xformer.ops.weights import InferenceWeight, PackedWeight, QuantizedWeight, inference_weights, named_weights
from xformer.random import Rng
from xformer.tracing.grad import stop_gradient
from xformer.tree import Module, is_array, map_named_modules, walk, with_fields

AnyModule = TypeVar("AnyModule", bound=Module)


class LoraWeight(InferenceWeight):
    """A matrix `base + scaling * lora_a @ lora_b`, whose base is frozen; with magnitudes, those are the column norms.

    Attributes:
        base: Matrix of shape (in_features, out_features), an array or a quantized weight.
        lora_a: Array of shape (in_features, rank).
        lora_b: Array of shape (rank, out_features).
        scaling: Factor of the product.
        magnitude: Norms of the columns (DoRA), (out_features,), or None. The matrix is divided by its own norms, which
            get no gradient (Liu et al., 2024, section 4.3).
    """

    base: Array | InferenceWeight
    lora_a: Array
    lora_b: Array
    scaling: float
    magnitude: Array | None = None

    @classmethod
    def make(
        cls, base: Array | InferenceWeight, lora_a: Array, lora_b: Array, scaling: float, magnitude: Array | None = None
    ) -> LoraWeight:
        """Return a weight with a frozen base; raise ConfigError for magnitudes of a quantized base."""
        if isinstance(base, InferenceWeight):
            if magnitude is not None:
                raise ConfigError("the model is quantized; use_dora expects floating weights")
            base = tree.freeze(base)
        return tree.with_frozen(cls(base, lora_a, lora_b, scaling, magnitude), frozenset({"base"}))

    @property
    def T(self) -> Any:
        """Not available: the weights of embeddings have no adapter."""
        raise ConfigError("a weight with an adapter has no transpose; use merge_lora(model)")

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the matrix."""
        return tuple(self.base.shape)

    @property
    def elements(self) -> Array:
        """The array of the base, before it is multiplied by the scales."""
        return self.base.elements if isinstance(self.base, InferenceWeight) else self.base

    @property
    def dtype(self) -> Any:
        """Floating dtype of the matrix."""
        return self.base.dtype

    def linear(self, rows: Array, bias: Array | None) -> Array:
        """Compute rows @ matrix + bias for rows (rows, in_features), by two products of the rank."""
        xp = array_namespace(rows, self.lora_a)
        low = linear(xp.astype(rows, self.lora_a.dtype, copy=False), self.lora_a)
        update = linear(low * self.scaling, self.lora_b)
        output = linear(rows, self.base, bias if self.magnitude is None else None)
        output = xp.add(output, xp.astype(update, output.dtype, copy=False))
        if self.magnitude is None:
            return output
        output = extra.cast_like(output * _column_factors(self.magnitude, self._sum()), output)
        return output if bias is None else xp.add(output, bias)

    def merged(self) -> Array:
        """Return the matrix as an array."""
        matrix = self._sum()
        if self.magnitude is None:
            return matrix
        return extra.cast_like(matrix * _column_factors(self.magnitude, matrix), matrix)

    def _sum(self) -> Array:
        base: Any = _dense(self.base)
        xp = array_namespace(base)
        update = xp.matmul(self.lora_a * self.scaling, self.lora_b)
        return base + xp.astype(update, base.dtype, copy=False)


def _column_factors(magnitude: Array, matrix: Array) -> Array:
    """Return the factors of the columns of a matrix that give them some norms, (out_features,)."""
    return extra.cast_like(magnitude / extra.cast_like(column_norms(stop_gradient(matrix)), matrix), matrix)


def column_norms(x: Array) -> Array:
    """Return the Euclidean norms of the columns of a matrix, in at least float32."""
    xp = array_namespace(x)
    x = xp.astype(x, xp.float32) if is_half_precision(x.dtype) else x
    return xp.sqrt(xp.sum(x * x, axis=0))


@check_arguments(
    r="use rank", lora_alpha="use alpha", target_modules="use targets", lora_dropout="dropout is a setting of the model"
)
def lora(
    model: AnyModule,
    rank: int = 8,
    *,
    alpha: float | None = None,
    targets: str | Collection[str] = "all-linear",
    use_dora: bool = False,
    seed: int = 0,
) -> AnyModule:
    """Return a model whose linear maps have adapters of low rank; everything else is frozen.

    The adapters change nothing until they are trained: `lora_b` is zero. `fit` and the optimizers see only the
    adapters. The model may be quantized (QLoRA: Dettmers et al., 2023): int8 weights and the blocks of a GGUF file
    stay as they are. Packed weights, which have no derivative, are unpacked.

    Args:
        model: A model; it is not changed.
        rank: Rank of the adapters.
        alpha: The product of an adapter is multiplied by `alpha / rank`; default `rank`.
        targets: Names of the linear maps that get adapters, such as `("query", "value")`; default all of
            them except the output layer, `"all-linear"`. A name may have a prefix: "self_attention.query".
        use_dora: Whether to learn the norms of the columns of the adapted weights, too (DoRA: Liu et al., 2024). Each
            call then computes the adapted weights; `merge_lora` avoids that.
        seed: Seed of the initial adapters.

    Returns:
        The model with a `LoraWeight` as the weight of these maps.

    Raises:
        ConfigError: If there is no linear map of a name, or the model has adapters; or if it is quantized and
            `use_dora` true.

    Examples:
        >>> import xformer as xf
        >>> config = xf.LanguageModelConfig(vocab_size=11, d_model=8, num_heads=2, d_ff=12, num_layers=1)
        >>> model = xf.lora(xf.LanguageModel(config), rank=2, targets=("query", "value"))
        >>> [name for name, _ in model.named_trainable_parameters()]  # doctest: +NORMALIZE_WHITESPACE
        ['layers.0.self_attention.query.weight.lora_a', 'layers.0.self_attention.query.weight.lora_b',
         'layers.0.self_attention.value.weight.lora_a', 'layers.0.self_attention.value.weight.lora_b']
    """
    check_count("rank", rank)
    use_dora = check_bool("use_dora", use_dora)
    scale = rank if alpha is None else alpha
    check_number("alpha", scale, above=0)
    packed = PackedWeight, PackedBlocks
    model = map_weights(model, lambda _, __, weight: weight.unpack() if isinstance(weight, packed) else weight)
    layers = linear_maps(model)
    if targets == "all-linear":
        chosen = [name for name in layers if "." in name] or list(layers)  # the output layer is a field of the model
    else:
        chosen = _matches(targets, layers)
    source = Rng(seed).fold_in("lora")

    def adapter(name: str, weight: Any) -> LoraWeight:
        like = weight.elements if isinstance(weight, InferenceWeight) else weight
        init = Initializer(array_namespace(like), seed=source.fold_in(name), device=device(like))
        in_features, out_features = weight.shape
        lora_a = init.uniform((in_features, rank), 1.0 / math.sqrt(in_features))
        dense = _dense(weight) if use_dora else None
        magnitude = None if dense is None else extra.cast_like(column_norms(dense), dense)
        return LoraWeight.make(weight, lora_a, init.zeros((rank, out_features)), float(scale) / rank, magnitude)

    return with_adapters(model, {name: adapter(name, layers[name].weight) for name in chosen})


def linear_maps(model: Any) -> dict[str, Linear]:
    """Return the linear maps of a model that can have adapters, by their dotted names.

    Raises:
        ConfigError: If the model has adapters already.
    """
    check_no_adapters(model)
    layers = {name: module for name, module in walk(model) if isinstance(module, Linear)}
    if not layers:
        raise ConfigError(f"model is {describe_type(model)}; expected a Module with linear maps")
    return layers


def _matches(targets: str | Collection[str], names: Collection[str]) -> list[str]:
    """Return the names that end with a target."""
    wanted = (targets,) if isinstance(targets, str) else tuple(targets or ())
    if not wanted:
        raise ConfigError(f"targets is {targets!r}; expected at least one name")
    for target in wanted:
        if not any(f".{name}".endswith(f".{target}") for name in names):
            known = sorted({name.rpartition(".")[2] for name in names})
            raise ConfigError(f"no linear map is called {target!r}; {nearest_hint(str(target), known)}")
    return [name for name in names if any(f".{name}".endswith(f".{target}") for target in wanted)]


def with_adapters(model: AnyModule, weights: dict[str, LoraWeight]) -> AnyModule:
    """Return a frozen model in which some linear maps have adapters, which are not frozen.

    Args:
        model: A model.
        weights: Weights with adapters, by the dotted names of the linear maps.
    """
    return map_weights(tree.freeze(model), lambda name, _, weight: weights.get(name, weight))


def map_weights(model: AnyModule, convert: Callable[[str, Module, Any], Any]) -> AnyModule:
    """Return a model whose linear maps and embeddings have the weights convert(name, layer, weight)."""

    def change(name: str, module: Module) -> Module:
        if not isinstance(module, Linear | Embedding):
            return module
        return with_fields(module, weight=convert(name, module, module.weight))

    return map_named_modules(change, model)


def has_adapters(model: Any) -> bool:
    """Return whether a linear map of a model has an adapter."""
    return any(isinstance(weight, LoraWeight) for weight in inference_weights(model))


def check_no_adapters(model: Any) -> None:
    """Raise ConfigError if a linear map of a model has an adapter."""
    if has_adapters(model):
        raise ConfigError("the model has adapters; use merge_lora(model), or save_lora(model, directory)")


def adapters_of(model: Any) -> dict[str, LoraWeight]:
    """Return the weights with adapters, by the dotted names of the linear maps.

    Raises:
        ConfigError: If the model has none.
    """
    found = {name.removesuffix(".weight"): x for name, x in walk(model) if isinstance(x, LoraWeight)}
    if not found:
        raise ConfigError("the model has no adapters; use xformer.lora(model) first")
    return found


def merge_lora(model: AnyModule) -> AnyModule:
    """Return a model without adapters: their products are added to the weights, and nothing is frozen.

    The weights of a quantized model become floating.

    Raises:
        ConfigError: If the model has no adapters.
    """
    adapters_of(model)
    return tree.unfreeze(map_weights(model, lambda _, __, weight: _dense(weight)))


def _dense(weight: Any) -> Any:
    """Return the matrix of a weight as an array, with its adapter, if any."""
    if isinstance(weight, LoraWeight):
        return weight.merged()
    return weight.dequantize() if isinstance(weight, InferenceWeight) else weight


def dense_arrays(model: Module) -> dict[str, Any]:
    """Return the arrays of `merge_lora(model)` by name; of weights in another form, functions that compute them."""
    return {
        name: functools.partial(_dense, weight) if isinstance(weight, InferenceWeight) else weight
        for name, weight in named_weights(model)
    }


# --- Quantized and packed, for inference ------------------------------------------------------------------------------


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
    if dtype not in formats.QUANTIZED_DTYPES:
        raise ConfigError(f"dtype is {dtype!r}; expected 'int8' or 'bfloat16'")
    check_no_adapters(module)
    module, current = unpack(module), formats.quantized_dtype(module)
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
        module = tree.map_modules(functools.partial(_with_joined_maps, names), module)
    if not native.is_available():
        return module

    def convert(_: str, layer: Module, weight: Any) -> Any:
        array = weight.elements if isinstance(weight, InferenceWeight) else weight
        is_float = array_namespace(array).name == "numpy" and dtype_name(weight.dtype) == "float32"
        return weight if getattr(weight, "is_packed", False) or not is_float else _packed(layer, weight)

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
    return map_weights(module, lambda _, __, x: x.unpack() if getattr(x, "is_packed", False) else x)
