"""Models as ONNX files, for onnxruntime and the browser."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from xformer.backends import Array
from xformer.errors import BackendError, ConfigError, how_to_install
from xformer.families.checkpoint import generation_config
from xformer.io import atomic_write, write_json
from xformer.layers import KVCache, LayerCache
from xformer.models import BaseModel, Encoder, ImageEncoder, LanguageModel, SpeechTransformer, Transformer
from xformer.models.cache import DecodingCache, Memory
from xformer.models.token_ids import padding_mask
from xformer.ops.quantized import quantized_dtype
from xformer.tree import replace

TOLERANCE = 1e-3  # largest difference from the model, relative to the largest magnitude of an output
_MAX_LENGTH = 2048  # default for models without a maximum of their own
_MAX_BYTES = 2**31 - 2**20  # of one file: a limit of protobuf
_STEP = 5  # new tokens of a step while it is traced; the graph takes any number

Arrays = dict[str, Any]
Shapes = dict[str, tuple[str, tuple[int | str, ...]]]  # dtypes and shapes by name


class OnnxExport(NamedTuple):
    """Files of a model that was exported to ONNX.

    Attributes:
        files: Paths of the ONNX files.
        difference: Largest difference from the outputs of the model, relative to the largest magnitude of an output;
            None if onnxruntime is not installed, so that the files were not verified.
    """

    files: tuple[Path, ...]
    difference: float | None


class _Graph(NamedTuple):
    """One ONNX file: names of its inputs with dtypes and shapes, and a function of a model and the inputs."""

    inputs: Shapes
    function: Callable[..., Arrays]


def export_onnx(model: BaseModel, directory: str | os.PathLike[str], *, max_length: int | None = None) -> OnnxExport:
    """Write a model as ONNX files, with dynamic batch and lengths, in float32.

    An encoder-decoder becomes encoder.onnx (source -> memory), decoder.onnx (whole targets -> logits) and step.onnx (new
    tokens and a cache -> logits of the next token and a longer cache); a language model becomes model.onnx and
    step.onnx; encoders become model.onnx. The directory also gets config.json, with the configuration of the model, and
    generation_config.json. docs/how-to/export-onnx.md describes inputs and outputs.

    If onnxruntime is installed, each file is run at two shapes and compared with the model before it is written.

    Args:
        model: The model, of any array library.
        directory: Directory to write to; created if necessary.
        max_length: Maximum tokens of a text. It determines the size of tables of positions. Default: max_positions of
            the configuration with learned positions, else 2048.

    Returns:
        The files, and the largest difference from the model.

    Raises:
        ConfigError: If the model is quantized, has more than 2 GB of parameters, or is of an unknown class; or if
            max_length exceeds its positions.
        BackendError: If spox is not installed, or if the files compute something else than the model.
        CheckpointError: If the directory cannot be written.
    """
    if importlib.util.find_spec("spox") is None:
        raise BackendError(f"ONNX files need spox and onnxruntime; {how_to_install('spox')}")
    if dtype := quantized_dtype(model):
        raise ConfigError(
            f"the model is quantized to {dtype}; export the original model, and quantize its files by "
            "onnxruntime.quantization.quantize_dynamic"
        )
    if 4 * model.parameter_count() > _MAX_BYTES:
        raise ConfigError(f"the model has {model.parameter_count():,} parameters; ONNX files hold at most 2 GB")
    max_length = _resolve_length(model, max_length)
    host = model.to("numpy", dtype="float32")
    graphs = _graphs(host)
    files = {name: _trace(host, graph, max_length) for name, graph in graphs.items()}
    difference = None
    if importlib.util.find_spec("onnxruntime") is not None:
        difference = max(_verify(name, host, graph, files[name], max_length) for name, graph in graphs.items())
    directory = Path(directory)
    for name, content in files.items():
        with atomic_write(directory / name) as file:
            file.write(content)
    settings = {"model": type(model).__name__, "max_length": max_length, "config": model.config.to_dict()}
    write_json(directory / "config.json", {"format": "onnx", **settings})
    if isinstance(model, Transformer | LanguageModel):
        write_json(directory / "generation_config.json", generation_config(model))
    return OnnxExport(tuple(directory / name for name in files), difference)


def _resolve_length(model: BaseModel, max_length: int | None) -> int:
    limit = model.config.max_positions if model.config.positions == "learned" else None
    if max_length is None:
        return limit or _MAX_LENGTH
    if not _STEP < max_length <= (limit or max_length):
        raise ConfigError(f"max_length is {max_length}; expected more than {_STEP}, and at most max_positions, {limit}")
    return max_length


# --- graphs of each class of models -----------------------------------------------------------------------------------


def _graphs(model: BaseModel) -> dict[str, _Graph]:
    """Return the graphs of a model by file name."""
    if isinstance(model, Transformer):
        return _transformer_graphs(model)
    if isinstance(model, LanguageModel):
        if not model.layers:
            raise ConfigError("num_layers is 0; expected at least 1 layer")
        tokens: Shapes = {"tokens": ("int64", ("batch", "length"))}
        whole = _Graph(tokens, lambda model, tokens: {"logits": model(tokens)})
        return {"model.onnx": whole, "step.onnx": _Graph(tokens | _past(model, len(model.layers)), _step)}
    if isinstance(model, Encoder):
        types: Shapes = {"token_types": ("int64", ("batch", "length"))} if model.token_types is not None else {}
        return {"model.onnx": _Graph({"tokens": ("int64", ("batch", "length")), **types}, _encode_texts)}
    if isinstance(model, ImageEncoder):
        c = model.config
        shape = ("batch", c.num_channels, c.image_size, c.image_size)
        return {"model.onnx": _Graph({"images": ("float32", shape)}, _encode_images)}
    raise ConfigError(f"a {type(model).__name__} cannot be exported to ONNX; expected a model of xformer")


def _transformer_graphs(model: Transformer) -> dict[str, _Graph]:
    c, num_layers = model.config, len(model.decoder)
    ids: Shapes = {"source": ("int64", ("batch", "source"))}
    source: Shapes = ids
    memory: Shapes = {"memory": ("float32", ("batch", "source", c.d_model))}
    if isinstance(model, SpeechTransformer):
        source, ids = {"source": ("float32", ("batch", "frames", c.source_vocab_size))}, {}
    if not num_layers:
        return {"encoder.onnx": _Graph(source, lambda model, source: {"memory": model.encode(source)})}
    lengths: Shapes = {"lengths": ("int64", ("batch",))} if c.length_encoding else {}
    copied: Shapes = memory | {"copy_key": memory["memory"]} if c.copy else {}
    projected = {f"memory_{name}_{i}": _heads(model, "source") for i in range(num_layers) for name in ("key", "value")}
    target: Shapes = {"target": ("int64", ("batch", "target"))}
    tokens: Shapes = {"tokens": ("int64", ("batch", "length"))}
    past = _past(model, num_layers)
    return {
        "encoder.onnx": _Graph(source, _encode),
        "decoder.onnx": _Graph(target | memory | ids | lengths, _decode),
        "step.onnx": _Graph(tokens | ids | lengths | copied | projected | past, _step),
    }


def _heads(model: BaseModel, length: str) -> tuple[str, tuple[int | str, ...]]:
    c = model.config
    return "float32", ("batch", c.num_key_value_heads or c.num_heads, length, c.features_per_head)


def _past(model: BaseModel, num_layers: int) -> Shapes:
    return {f"past_{name}_{i}": _heads(model, "past") for i in range(num_layers) for name in ("key", "value")}


# The functions below run on NumPy, too: `_verify` compares.


def _encode(model: Transformer, source: Array) -> Arrays:
    cache = model.prefill(source, lengths=source[:, 0] if model.config.length_encoding else None)  # has no effect here
    memory: Any = cache.memory
    outputs = {"memory": memory.states}
    if memory.copy_key is not None:
        outputs["copy_key"] = memory.copy_key
    for i, layer in enumerate(cache.layers):
        outputs[f"memory_key_{i}"] = layer.cross_attention.key
        outputs[f"memory_value_{i}"] = layer.cross_attention.value
    return outputs


def _decode(model: Transformer, target: Array, memory: Array, **options: Array) -> Arrays:
    return {"logits": model.decode(target, memory, **options)}


def _step(model: Any, tokens: Array, **inputs: Any) -> Arrays:
    num_layers, memory = sum(name.startswith("past_key_") for name in inputs), None
    if isinstance(model, Transformer):
        source = inputs.get("source")
        mask = None if source is None else padding_mask(source, model.config.source_padding_id)
        memory = Memory(inputs.get("memory"), source, mask, inputs.get("lengths"), inputs.get("copy_key"))  # type: ignore[arg-type]
    cache = DecodingCache(0, like=inputs["past_key_0"], memory=memory)
    cache.length = inputs["past_key_0"].shape[2]
    for i in range(num_layers):
        past, other = (KVCache(inputs.get(f"{name}_key_{i}"), inputs.get(f"{name}_value_{i}")) for name in ("past", "memory"))
        cache.layers.append(LayerCache(past, other))
    outputs = {"logits": model.decode_step(tokens, cache)}
    for i, layer in enumerate(cache.layers):
        outputs[f"present_key_{i}"] = layer.self_attention.key
        outputs[f"present_value_{i}"] = layer.self_attention.value
    return outputs


def _encode_texts(model: Encoder, tokens: Array, token_types: Array | None = None) -> Arrays:
    outputs = {"states": model(tokens, token_types=token_types)}
    if model.classifier is not None:
        outputs["class_logits"] = model.class_logits(outputs["states"])
    if model.masked_lm is not None:
        outputs["masked_lm_logits"] = model.masked_lm_logits(outputs["states"])
    return outputs


def _encode_images(model: ImageEncoder, images: Array) -> Arrays:
    outputs = {"states": model(images)}
    if model.classifier is not None:
        outputs["class_logits"] = model.class_logits(outputs["states"])
    return outputs


# --- tracing and verification -----------------------------------------------------------------------------------------


def _trace(model: BaseModel, graph: _Graph, max_length: int) -> bytes:
    """Return the ONNX file of a graph."""
    import spox
    from spox import _future

    from xformer.export import onnx_kernels, onnx_namespace

    limits = dict.fromkeys(("source", "target"), max_length) | {"batch": 3, "past": max_length - _STEP}
    limits |= {"length": _STEP if "past_key_0" in graph.inputs else max_length}
    limits["frames"] = 2 * getattr(model.config, "max_source_positions", 0)
    inputs = onnx_namespace.Inputs(limits)
    silent = _future.type_warning_level(_future.TypeWarningLevel.NONE)  # without values, spox infers few shapes
    with silent, _future.value_prop_backend(_future.ValuePropBackend.NONE):
        for name, (dtype, shape) in graph.inputs.items():
            inputs.add(name, dtype, shape)
        parameters = {name: onnx_namespace.parameter(name, x) for name, x in model.named_parameters()}
        outputs = graph.function(replace(model, parameters), **inputs.arrays)
        variables = {name: x.var for name, x in inputs.arrays.items()}
        proto = spox.build(variables, {name: onnx_namespace.output(x) for name, x in outputs.items()})
    return proto.SerializeToString()


def _verify(name: str, model: BaseModel, graph: _Graph, content: bytes, max_length: int) -> float:
    """Return the largest difference of a file from the model at two shapes."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    rng, difference = np.random.default_rng(0), 0.0
    for sizes in ({"batch": 1, "source": 1, "target": 1, "length": 1, "past": 0, "frames": 4}, {"batch": 2, "source": 70, "target": 67, "length": 3, "past": 66, "frames": 140}):
        inputs = {}
        for key, (dtype, shape) in graph.inputs.items():
            lengths = [sizes[n] if isinstance(n, str) else n for n in shape]
            lengths = [min(n, max_length - _STEP) for n in lengths] if dtype == "int64" else lengths
            inputs[key] = rng.integers(0, _num_ids(model, key), lengths) if dtype == "int64" else rng.standard_normal(lengths).astype("float32")
        expected = graph.function(model, **inputs)
        actual = dict(zip(names, session.run(names, inputs), strict=True))
        for key, y in expected.items():
            difference = max(difference, float(np.max(np.abs(actual[key] - y))) / max(1.0, float(np.max(np.abs(y)))))
    if not difference < TOLERANCE:
        raise BackendError(f"{name} differs from the model by {difference:.1e}; expected less than {TOLERANCE:.0e}")
    return difference


def _num_ids(model: Any, name: str) -> int:
    c = model.config
    return {"source": getattr(c, "source_vocab_size", 0), "token_types": getattr(c, "num_token_types", 0), "lengths": 99}.get(name, getattr(model, "vocab_size", 0))
