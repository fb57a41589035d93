"""Models as ONNX files, for onnxruntime and the browser."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from xformer.backends import Array
from xformer.errors import BackendError, ConfigError, describe_type, how_to_install
from xformer.families.checkpoint import generation_config
from xformer.io import StrPath, write_bytes, write_json
from xformer.layers import KVCache, LayerCache
from xformer.layers.cache import DecodingCache, Memory
from xformer.layers.weights import check_no_adapters
from xformer.models import Encoder, ImageEncoder, ImageTextEncoder, LanguageModel, SpeechTransformer, Transformer
from xformer.models.base import BaseModel
from xformer.models.token_ids import padding_mask
from xformer.ops.weights import quantized_dtype
from xformer.threads import num_threads
from xformer.tree import replace

TOLERANCE = 1e-3  # largest difference from the model, relative to the largest magnitude of an output
_MAX_LENGTH = 2048  # default for models without a maximum
_MAX_BYTES = 2**31 - 2**20  # of one file: a limit of protobuf
_STEP = 5  # new tokens of a step while it is traced; the graph takes any number

# Values of named sizes at which files are compared with the model; the second ones pass a small table of positions.
_CHECKED_SIZES = (
    {"batch": 1, "source": 1, "target": 1, "length": 1, "past": 0, "frames": 4, "rows": 0},
    {"batch": 2, "source": 70, "target": 67, "length": 3, "past": 66, "frames": 140, "rows": 2},
)

Arrays = dict[str, Any]


class Input(NamedTuple):
    """An input of a graph: sizes, or names of those that differ between calls; number of ids, or 0 for floats.

    Floats of a switch are 0 or 1.
    """

    shape: tuple[int | str, ...]
    num_ids: int = 0
    is_switch: bool = False

    @property
    def dtype(self) -> str:
        """Name of the dtype."""
        return "int64" if self.num_ids else "float32"


Inputs = dict[str, Input]


class OnnxExport(NamedTuple):
    """Files of a model that was exported to ONNX.

    Attributes:
        files: Paths of the ONNX files.
        difference: Largest difference from the outputs of the model, relative to the largest magnitude of an output;
            None if onnxruntime is not installed, so that the files were not verified.
    """

    files: tuple[Path, ...]
    difference: float | None


class Graph(NamedTuple):
    """One ONNX file: its inputs, and a function of a model and arrays that returns the outputs by name."""

    inputs: Inputs
    function: Callable[..., Arrays]


def export_onnx(model: BaseModel, directory: StrPath, *, max_length: int | None = None) -> OnnxExport:
    """Write a model as ONNX files, with dynamic batch and lengths.

    - Encoder-decoder: encoder.onnx encodes sources, decoder.onnx computes the logits of whole targets, and step.onnx
      those of the next token, with a cache of earlier tokens as further inputs and outputs.
    - Language model: model.onnx computes the logits of whole texts, step.onnx those of the next token.
    - Encoder of texts or images: model.onnx.
    - Encoder of images and texts: image.onnx and text.onnx compute the vectors of either.

    The directory also gets config.json, with the configuration of the model, and generation_config.json. If
    onnxruntime is installed, each file is run at two shapes and compared with the model before it is written.

    Inputs, outputs and parameters are float32. The weights of `model.quantize()` are int8 in the files; onnxruntime
    makes them float32 when it loads them.

    Args:
        model: The model, of any array library.
        directory: Directory to write to; created if necessary.
        max_length: Maximum tokens of a text, which determines the size of tables of positions. Default: the number of
            learned positions, or 2048.

    Returns:
        The files, and the largest difference from the model.

    Raises:
        ConfigError: If the model is quantized to another dtype than int8, has more than 2 GB of parameters, or is of an
            unknown class; or if max_length exceeds its positions.
        BackendError: If spox is not installed, or if a file computes something else than the model.
        CheckpointError: If the directory cannot be written.
    """
    limits = limits_of(model, max_length)
    exported = write_graphs(model, graphs(model), directory, limits)
    directory = Path(directory)
    write_json(directory / "config.json", _settings(model, limits["target"]))
    if isinstance(model, Transformer | LanguageModel):
        write_json(directory / "generation_config.json", generation_config(model))
    return exported


def write_graphs(model: BaseModel, graphs: dict[str, Graph], directory: StrPath, limits: dict[str, int]) -> OnnxExport:
    """Write graphs of a model as files; errors are those of `export_onnx`.

    Args:
        model: The model, of any array library.
        graphs: The graphs by file name.
        directory: Directory to write to; created if necessary.
        limits: Largest value of each named size; see `limits_of`.
    """
    if importlib.util.find_spec("spox") is None:
        raise BackendError(f"ONNX files need spox and onnxruntime; {how_to_install('spox')}")
    check_no_adapters(model)
    model = model.unpack()
    if (dtype := quantized_dtype(model)) not in (None, "int8"):
        raise ConfigError(f"the model is quantized to {dtype}; export the original model, or model.quantize('int8')")
    host = model.to("numpy", dtype="float32")
    if sum(np.asarray(x).nbytes for _, x in host.named_arrays()) > _MAX_BYTES:
        hint = "try int8 (model.quantize(), or --quantization int8)"
        raise ConfigError(f"the model has {host.parameter_count():,} parameters; ONNX files hold at most 2 GB; {hint}")
    files = {name: _trace(host, graph, limits) for name, graph in graphs.items()}
    difference = None
    if importlib.util.find_spec("onnxruntime") is not None:
        difference = max(_verify(name, host, graphs, files[name], limits) for name in graphs)
    directory = Path(directory)
    for name, content in files.items():
        write_bytes(directory / name, content)
    return OnnxExport(tuple(directory / name for name in files), difference)


def _settings(model: BaseModel, max_length: int) -> dict[str, Any]:
    """Return the contents of config.json."""
    c, heads = model.config, {}
    if not isinstance(model, ImageTextEncoder):
        heads = {"num_key_value_heads": c.num_key_value_heads or c.num_heads, "head_dim": c.features_per_head}
    return {"format": "onnx", "model": type(model).__name__, "max_length": max_length, **heads, "config": c.to_dict()}


def limits_of(model: BaseModel, max_length: int | None) -> dict[str, int]:
    """Return the largest value of each named size."""
    c = model.text.config if isinstance(model, ImageTextEncoder) else model.config
    limit = c.max_positions if c.positions == "learned" else None
    if max_length is None:
        max_length = _MAX_LENGTH if limit is None else limit
    if not _STEP < max_length <= (max_length if limit is None else limit):
        expected = f"more than {_STEP}" if limit is None else f"{_STEP + 1} to {limit}, the positions of the model"
        raise ConfigError(f"max_length is {max_length}; expected {expected}")
    frames = 2 * model.config.max_source_positions if isinstance(model, SpeechTransformer) else max_length
    texts = dict.fromkeys(("source", "target", "tokens", "rows"), max_length)
    return {**texts, "batch": 3, "frames": frames, "length": _STEP, "past": max_length - _STEP}


# --- graphs of each class of models -----------------------------------------------------------------------------------


def graphs(model: BaseModel) -> dict[str, Graph]:
    """Return the graphs of a model by file name."""
    if isinstance(model, Transformer):
        return _transformer_graphs(model)
    if isinstance(model, LanguageModel):
        if not model.layers:
            raise ConfigError("num_layers is 0; expected at least 1 layer")
        tokens = {"tokens": Input(("batch", "target"), model.vocab_size)}
        new_tokens = {"tokens": Input(("batch", "length"), model.vocab_size)}
        return {
            "model.onnx": Graph(tokens, lambda model, tokens: {"logits": model(tokens)}),
            "step.onnx": Graph(new_tokens | _keys_and_values(model, "past", len(model.layers)), _step),
        }
    if isinstance(model, Encoder):
        tokens = {"tokens": Input(("batch", "source"), model.vocab_size)}
        if model.token_types is not None:
            tokens["token_types"] = Input(("batch", "source"), model.config.num_token_types)
        return {"model.onnx": Graph(tokens, _encode_texts)}
    if isinstance(model, ImageEncoder | ImageTextEncoder):
        c = model.config if isinstance(model, ImageEncoder) else model.image.config
        images = {"images": Input(("batch", c.num_channels, c.image_size, c.image_size))}
        if isinstance(model, ImageEncoder):
            return {"model.onnx": Graph(images, lambda model, images: _with_classes(model, model(images)))}
        tokens = {"tokens": Input(("batch", "source"), model.text.vocab_size)}
        return {
            "image.onnx": Graph(images, lambda model, images: {"vectors": model.encode_image(images)}),
            "text.onnx": Graph(tokens, lambda model, tokens: {"vectors": model._encode_ids(tokens)}),
        }
    raise ConfigError(f"{describe_type(model)} cannot be exported to ONNX; expected a model class of xformer")


def _transformer_graphs(model: Transformer) -> dict[str, Graph]:
    c, num_layers = model.config, len(model.decoder)
    source = ids = {"source": Input(("batch", "source"), c.source_vocab_size)}
    memory = {"memory": Input(("batch", "source", c.d_model))}
    if isinstance(model, SpeechTransformer):
        source, ids = {"source": Input(("batch", "frames", c.source_vocab_size))}, {}
    if not num_layers:
        return {"encoder.onnx": Graph(source, lambda model, source: {"memory": model.encode(source)})}
    lengths = {"lengths": Input(("batch",), 100)} if c.length_encoding else {}
    copied = memory | {"copy_key": memory["memory"]} if c.copy else {}
    target = {"target": Input(("batch", "target"), c.target_vocab_size)}
    tokens = {"tokens": Input(("batch", "length"), c.target_vocab_size)}
    caches = _keys_and_values(model, "memory", num_layers) | _keys_and_values(model, "past", num_layers)
    return {
        "encoder.onnx": Graph(source, _encode),
        "decoder.onnx": Graph(target | memory | ids | lengths, _decode),
        "step.onnx": Graph(tokens | ids | lengths | copied | caches, _step),
    }


def _keys_and_values(model: BaseModel, name: str, num_layers: int) -> Inputs:
    """Return inputs with the keys and values of a cache, "past" or "memory"."""
    c = model.config
    length = {"past": "past", "memory": "source"}[name]
    heads = Input(("batch", c.num_key_value_heads or c.num_heads, length, c.features_per_head))
    return {f"{name}_{part}_{i}": heads for i in range(num_layers) for part in ("key", "value")}


# The functions below run on NumPy, too: `_verify` compares.


def _encode(model: Transformer, source: Any) -> Arrays:
    cache = model.prefill(source, lengths=source[:, 0] if model.config.length_encoding else None)  # has no effect here
    memory: Any = cache.memory
    outputs = {"memory": memory.states}
    if memory.copy_key is not None:
        outputs["copy_key"] = memory.copy_key
    return outputs | _stored("memory", [layer.cross_attention for layer in cache.layers])


def _stored(name: str, caches: Sequence[Any]) -> Arrays:
    return {f"{name}_{part}_{i}": getattr(each, part) for i, each in enumerate(caches) for part in ("key", "value")}


def _decode(model: Transformer, target: Array, memory: Array, **options: Any) -> Arrays:
    return {"logits": model.decode(target, memory, **options)}


def cache_of(model: BaseModel, inputs: Arrays) -> DecodingCache:
    """Return the cache of a step, with the arrays of its inputs."""
    memory = None
    if isinstance(model, Transformer):
        source = inputs.get("source")
        mask = None if source is None else padding_mask(source, model.config.source_padding_id)
        states: Any = inputs.get("memory")  # for a copy head only
        memory = Memory(states, source, mask, inputs.get("lengths"), inputs.get("copy_key"))
    cache = DecodingCache(0, like=inputs["past_key_0"], memory=memory)
    cache.length = inputs["past_key_0"].shape[2]
    for i in range(sum(name.startswith("past_key_") for name in inputs)):
        pairs = ([inputs.get(f"{name}_{part}_{i}") for part in ("key", "value")] for name in ("past", "memory"))
        cache.layers.append(LayerCache(*(KVCache(*pair) for pair in pairs)))
    return cache


def step(model: Any, tokens: Array, cache: DecodingCache) -> Arrays:
    """Return the outputs of a step: the logits of the next token, and the keys and values of all tokens."""
    logits = model.decode_step(tokens, cache)
    return {"logits": logits} | _stored("present", [layer.self_attention for layer in cache.layers])


def _step(model: Any, tokens: Array, **inputs: Any) -> Arrays:
    return step(model, tokens, cache_of(model, inputs))


def _encode_texts(model: Encoder, tokens: Array, token_types: Array | None = None) -> Arrays:
    mask = padding_mask(tokens, model.config.pad_id)
    mask = tokens >= 0 if mask is None else mask
    outputs = _with_classes(model, model(tokens, token_types=token_types), mask=mask)
    if model.masked_lm is not None:
        outputs["masked_lm_logits"] = model.masked_lm_logits(outputs["states"])
    return outputs


def _with_classes(model: Any, states: Array, **options: Any) -> Arrays:
    return {"states": states} | ({"class_logits": model.class_logits(states, **options)} if model.classifier else {})


# --- tracing and verification -----------------------------------------------------------------------------------------


def _trace(model: BaseModel, graph: Graph, limits: dict[str, int]) -> bytes:
    """Return the ONNX file of a graph."""
    from spox import _future

    from xformer.export import onnx_namespace

    onnx_namespace.register_kernels()
    parameters = dict(model.named_arrays())
    silent = _future.type_warning_level(_future.TypeWarningLevel.NONE)  # without values, spox infers few shapes
    with silent, _future.value_prop_backend(_future.ValuePropBackend.NONE):
        inputs = onnx_namespace.make_inputs(graph.inputs | parameters, limits)
        traced = replace(model, {name: inputs[name] for name in parameters})
        outputs = graph.function(traced, **{name: inputs[name] for name in graph.inputs})
        return onnx_namespace.build(inputs, outputs, parameters)


def _verify(name: str, model: BaseModel, graphs: dict[str, Graph], content: bytes, limits: dict[str, int]) -> float:
    """Return the largest difference of a file from the model at two shapes."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = num_threads()
    session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    names, difference = [output.name for output in session.get_outputs()], 0.0
    for sizes in _CHECKED_SIZES:
        inputs = _inputs(name, model, graphs, {size: min(value, limits[size]) for size, value in sizes.items()})
        actual = dict(zip(names, session.run(names, inputs), strict=True))
        for key, expected in graphs[name].function(model, **inputs).items():
            scale = float(np.max(np.abs(expected), initial=1.0))
            error = np.max(np.abs(actual[key] - expected), initial=0.0) / scale
            difference = float(np.maximum(difference, error))  # NaN, if any
    if not difference < TOLERANCE:
        raise BackendError(f"{name} differs from the model by {difference:.1e}; expected less than {TOLERANCE:.0e}")
    return difference


def _inputs(name: str, model: BaseModel, graphs: dict[str, Graph], sizes: dict[str, int]) -> Arrays:
    """Return random inputs of a graph; states, keys and values are those that the model computes from others.

    A model may be far more sensitive to rounding at states that it never computes.
    """
    rng, graph = np.random.default_rng(0), graphs[name]

    def draw(x: Input, sizes: dict[str, int]) -> Any:
        shape = [sizes[size] if isinstance(size, str) else size for size in x.shape]
        if x.num_ids or x.is_switch:
            return rng.integers(0, x.num_ids or 2, shape).astype(x.dtype)
        return rng.standard_normal(shape, dtype=np.float32)

    inputs = {key: draw(x, sizes) for key, x in graph.inputs.items()}
    if name != "encoder.onnx" and "encoder.onnx" in graphs:
        encoder = _inputs("encoder.onnx", model, graphs, sizes)
        computed = {"source": encoder["source"]} | graphs["encoder.onnx"].function(model, **encoder)
        inputs |= {key: value for key, value in computed.items() if key in inputs}
    if "past_key_0" in inputs and sizes["past"]:
        first = {"past": 0, "length": sizes["past"], "rows": 0}
        earlier = {key: draw(x, sizes | first) for key, x in graph.inputs.items() if {*first} & {*x.shape}}
        computed = graph.function(model, **(inputs | earlier))
        inputs |= {key: computed[key.replace("past", "present")] for key in inputs if key.startswith("past_")}
        if "lens" in inputs:
            inputs["lens"] = computed["states"][:, : sizes["rows"], :]
    return inputs
