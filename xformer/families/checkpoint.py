"""`load_pretrained` and `save_pretrained`: checkpoint directories in the Hugging Face format."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import math
import re
import threading
from collections.abc import Callable, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from xformer import io, models, native
from xformer.backends import Array, Device, DType, dtype_name, resolve, to_host
from xformer.config import check_bool, check_count
from xformer.errors import CheckpointError, ConfigError, ShapeError, check_arguments, describe_type, nearest_hint
from xformer.families.family import FAMILIES, ConfigReader, Family, family_of
from xformer.families.feature_order import with_separate_halves
from xformer.families.gguf_file import GGUFFile, find_gguf
from xformer.families.layouts import Layout
from xformer.families.tensor_files import TensorFiles, remove_shards
from xformer.io import StrPath, atomic_write, check_path, file_errors, read_json, save_arrays, write_json
from xformer.layers import Initializer
from xformer.layers.positions import sinusoidal
from xformer.layers.weights import check_no_adapters, inference_weights_of
from xformer.models.base import BaseModel
from xformer.models.config import GATED, PROBLEM_TYPES
from xformer.ops.blocks import BlockWeight
from xformer.ops.weights import QUANTIZED_DTYPES, quantized_dtype
from xformer.text.normalize import check_texts
from xformer.threads import parallel_map, run_serially
from xformer.tree import first_array, replace, with_fields

_LOG = logging.getLogger("xformer")
Progress = Callable[[int, int], None]
_POSITION_TOLERANCE = 1e-2  # above the error of bfloat16, far below that of other positions
_EXPERTS_HINT = (
    "it has experts; expected norm 'rms', activation 'swiglu', positions 'rotary', and attention_bias, "
    "feed_forward_bias and scale_embeddings false, as in Mixtral; model.save(path) writes any model"
)
_MANY, _MAX_SHOWN = 99, 3  # fields in which a family differs from a model
_HUB_NAME = r"[A-Za-z0-9][\w.-]*/[\w.-]+(?<!\.gguf)(?<!\.safetensors)"


def is_public(directory: StrPath) -> bool:
    """Return whether a path is a public checkpoint (a directory or a GGUF file) rather than a run of xformer.

    Raises:
        CheckpointError: If the path does not exist, or config.json is damaged.
    """
    check_exists(directory)
    path = Path(directory) / "config.json"
    if path.is_file():
        return "model_type" in read_json(path, "configuration")
    return find_gguf(Path(directory)) is not None


def check_exists(directory: StrPath) -> None:
    """Raise CheckpointError if the path of a model does not exist."""
    check_path(directory)
    with file_errors(f"{directory} cannot be read", "; expected the path of a model"):  # e.g. a name that is too long
        exists = Path(directory).exists()
    if not exists:
        raise CheckpointError(describe_missing(Path(directory)))


def describe_missing(path: Path) -> str:
    """Return an error message for a path that is neither a run nor a public checkpoint."""
    expected = (
        "expected the directory of a run, a directory in the Hugging Face format (config.json, model.safetensors, "
        "tokenizer.json) or a .gguf file"
    )
    if path.is_file():
        return f"{path} is a file of another format; {expected}"
    if path.exists():
        return f"{path} has no config.json; {expected}"
    if (gguf := path.with_name(path.name + ".gguf")).is_file():
        return f"{path} does not exist; did you mean {gguf}?"
    is_hub_name = re.fullmatch(_HUB_NAME, str(path)) and not path.parent.exists()
    download = f", so download it first: hf download {path} --local-dir {path.name}" if is_hub_name else ""
    return f"{path} does not exist; {expected}; xformer downloads nothing{download}"


class Checkpoint(NamedTuple):
    """A public checkpoint whose parameters have not been read.

    Attributes:
        path: Its path.
        family: Its family.
        model: The model, whose parameters are zeros that take no memory.
        tensors: The tensors of the files.
        config_path: The file with the configuration.
        tied: Names in `Family.tied` whose tensors are absent or equal the other one.
        is_new_head: Whether the model has a classifier in place of the heads of the files.
    """

    path: Path
    family: Family
    model: Any
    tensors: TensorFiles
    config_path: Path
    tied: frozenset[str]
    is_new_head: bool = False


def open_checkpoint(path: Path, classes: dict[str, Any] | None = None) -> Checkpoint:
    """Read the configuration of a public checkpoint and the names of its tensors; raises as `load_pretrained` does.

    Args:
        path: Directory or file.
        classes: Fields of a classifier that replaces the heads.
    """
    gguf = find_gguf(path)
    if gguf is not None:
        file = GGUFFile(gguf)
        config_path, values = gguf, file.config
    else:
        config_path = path / "config.json"
        if not config_path.is_file():
            raise CheckpointError(describe_missing(path))
        values = read_json(config_path, "configuration")
        _check_supported(values, path)
    try:
        family = family_of(values.get("model_type"), config_path)
        tensors, stored = (TensorFiles(path), family) if gguf is None else (file, file.architecture.family)
        tied = _tied_names(stored, tensors)
        # The reader of config.json knows the tied tensors by the names of the family.
        pairs = zip((*stored.tied, *stored.tied.values()), (*family.tied, *family.tied.values()), strict=True)
        names = dict(pairs)
        known = [names.get(each, each) for each in tensors]
        reader = ConfigReader(values, config_path, known, {names[each] for each in tied})
        reader.classes = classes
        if gguf is None and (generation := path / "generation_config.json").exists():
            reader.generation = ConfigReader(read_json(generation, "generation settings"), generation, (), ())
        config = family.read_config(reader)
        if classes and not getattr(config, "num_labels", 0):
            expected = "num_labels and labels expect an encoder such as BERT, RoBERTa or ModernBERT"
            raise ConfigError(f"models of type {reader.model_type} have no classifier; {expected}")
        reader.skip("quantization_config")  # the tensors show it
        reader.finish()
        model = with_fields(family.model(config, seed=None), model_type=reader.model_type)
        return Checkpoint(path, stored, model, tensors, config_path, tied, classes is not None)
    except CheckpointError as error:  # may quote a huge value
        raise CheckpointError(str(error)) from error
    except ConfigError as error:
        raise CheckpointError(f"{config_path}: {error}") from error


@check_arguments()
def load_pretrained(
    directory: StrPath,
    *,
    xp: Any = "numpy",
    dtype: DType | str | None = None,
    device: Device = None,
    quantize: str | None = None,
    pack: bool = False,
    progress: Progress | None = None,
    num_labels: int | None = None,
    labels: Sequence[str] | None = None,
    problem_type: str | None = None,
) -> BaseModel:
    """Load a model: a public checkpoint in the Hugging Face format, a GGUF file of llama.cpp, or a run of xformer.

    Besides the model, memory holds one tensor for each thread. Nothing is downloaded, and no code of the checkpoint
    runs. An unknown tensor or key of config.json is an error.

    Args:
        directory: Directory with config.json and safetensors files, or with one GGUF file; a GGUF file; or a
            safetensors file that `BaseModel.save` wrote.
        xp: Array library, as a module or by name.
        dtype: Floating dtype of the parameters. Default: that of the file; float32 if the library lacks it, for
            bfloat16 in NumPy, and for quantized tensors of GGUF files that are not packed. MXFP4 tensors of gpt-oss
            are dequantized.
        device: Device of the parameters, as the library names it.
        quantize: "int8" or "bfloat16" to quantize the weights for inference (`layers.quantize`), in place of `dtype`.
            On NumPy each weight is quantized as it is read, so the float32 model is never in memory as a whole. Or
            "int8_inputs" to keep the blocks of a GGUF file, and round the inputs that they multiply to 8 bits
            (`layers.pack` with `inputs="int8"`).
        pack: Whether to pack the weights for inference (`layers.pack`), in the same way. Without a `dtype` and
            `quantize`, the quantized blocks of a GGUF file stay as they are in the file, which is mapped into memory
            and must not change.
        progress: Called after each tensor with the number of values read so far and their total. On NumPy, calls may
            come from several threads, but never at the same time.
        num_labels: Number of classes, to fine-tune an encoder as a classifier. It replaces other heads. Its parameters
            that the checkpoint has not are new, and a message names them; with the same number of classes, its
            classifier is kept. Default: the number of labels; without both, the model has the heads of the checkpoint.
        labels: Names of the classes.
        problem_type: "single_label_classification", "multi_label_classification" or "regression", the default of a
            single label.

    Returns:
        A `LanguageModel`, `Transformer`, `SpeechTransformer`, `Encoder`, `ImageEncoder` or `ImageTextEncoder`.

    Raises:
        CheckpointError: If the checkpoint is damaged, of an unknown family, or needs a computation that xformer does
            not have.
        BackendError: If the library, dtype or device is not available.

    Examples:
        >>> model = load_pretrained("SmolLM2-135M-Instruct")  # doctest: +SKIP
        >>> logits = model([[504, 3575, 282]])  # doctest: +SKIP
    """
    check_exists(directory)
    pack = check_bool("pack", pack)
    if quantize is not None and quantize not in (*QUANTIZED_DTYPES, "int8_inputs"):
        raise ConfigError(f"quantize is {quantize!r}; expected 'int8', 'bfloat16' or 'int8_inputs'")
    path, classes = Path(directory), _classes(num_labels, labels, problem_type)
    if not is_public(path) and (path.is_file() or (path / "model.safetensors").is_file()):
        file = path if path.is_file() else path / "model.safetensors"
        if classes:
            raise ConfigError(f"{path} is a model of xformer; num_labels and labels expect a public checkpoint")
        return for_inference(models.load(file, xp=xp, dtype=dtype, device=device), quantize, pack)
    checkpoint = open_checkpoint(path)
    if classes:
        _stored_names(checkpoint)
        checkpoint = open_checkpoint(path, classes)
    xp, requested, rounds = resolve(xp), dtype, quantize == "int8_inputs"
    if rounds and xp.name != "numpy":
        heads: dict[str, Any] = {"num_labels": num_labels, "labels": labels, "problem_type": problem_type}
        return load_pretrained(path, quantize=quantize, progress=progress, **heads).to(xp, device=device)
    dtype = xp.default_float(io.restorable_dtype(xp, checkpoint.tensors.dtype()) if dtype is None else dtype)
    converters: dict[str, Callable[[Array], Any]] = {}
    keep_blocks = False
    if xp.name == "numpy" and quantize is not None:
        dtype = xp.float32
    if xp.name == "numpy" and dtype_name(dtype) == "float32":
        pack = pack and native.is_available()
        if pack or quantize is not None:
            converters = inference_weights_of(checkpoint.model, None if rounds else quantize, packed=pack)
            keep_blocks = rounds or (pack and quantize is None and requested is None)
    place = functools.partial(xp.from_host, dtype=dtype, device=device)
    arrays = _read_parameters(checkpoint, converters, xp, place, keep_blocks=keep_blocks, progress=progress)
    try:
        model = replace(checkpoint.model, arrays)
    except (ConfigError, ShapeError) as error:
        raise CheckpointError(f"{path}: {error}") from error
    return model if converters and not rounds else for_inference(model, quantize, pack)


def _classes(num_labels: int | None, labels: Sequence[str] | None, problem_type: str | None) -> dict[str, Any] | None:
    """Return the fields of the classifier that arguments of `load_pretrained` describe; None for no new one."""
    if num_labels is None and labels is None and problem_type is None:
        return None
    if labels is not None:
        check_texts(sorted(labels) if isinstance(labels, set) else labels, "labels")
        labels = tuple(labels)
    count: Any = len(labels or ()) if num_labels is None else num_labels
    check_count("num_labels", count)
    if labels is not None and not len(labels) == len({*labels}) == count:
        raise ConfigError(f"labels is {labels!r:.100}; expected num_labels, {count}, different names")
    problem_type = PROBLEM_TYPES[-(count == 1)] if problem_type is None else problem_type
    return {"num_labels": count, "labels": labels, "problem_type": problem_type}


def for_inference(model: BaseModel, quantize: str | None, pack: bool) -> BaseModel:
    """Return a model that is quantized, unless `quantize` is None, and packed on request."""
    if quantize == "int8_inputs":
        return model.pack(inputs="int8")
    model = model if quantize is None else model.quantize(quantize)
    return model.pack() if pack else model


def _read_parameters(
    checkpoint: Checkpoint,
    converters: dict[str, Callable[[Array], Any]],
    xp: Any,
    place: Callable[[Any], Array],
    *,
    keep_blocks: bool,
    progress: Progress | None,
) -> dict[str, Any]:
    """Read all tensors, and return the parameters by name; errors are those of `load_pretrained`.

    Those of a head that the file lacks are initial ones.

    Args:
        checkpoint: The checkpoint.
        converters: Those of `inference_weights_of`, for the parameters that they name.
        xp: Array library.
        place: Function that turns an array of NumPy into one of the library.
        keep_blocks: Do not convert parameters that the file has in quantized blocks.
        progress: As for `load_pretrained`.
    """
    model, tensors, path = checkpoint.model, checkpoint.tensors, checkpoint.path
    shapes = {name: tuple(x.shape) for name, x in model.named_parameters()}
    stored_names, layouts = _stored_names(checkpoint), checkpoint.family.layouts_of(model)
    lacking = [each for name, (_, parameters) in layouts.items() if name not in stored_names for each in parameters]
    if lacking:
        _LOG.warning("%s lacks %s; they are new: train the model before use", path, ", ".join(sorted(lacking)))
    _check_positions(path, model.config, tensors)

    def convert(parameter: str, values: Any) -> Any:
        if parameter in converters:  # which copy it, so that the file stays as it is
            return converters[parameter](np.asarray(values, dtype=np.float32))
        return place(np.array(values, order="C"))

    init = Initializer()
    arrays = {each: convert(each, _initial(init, each, shapes[each])) for each in lacking}
    num_read, num_values = 0, sum(math.prod(shapes[name]) for name in shapes.keys() - arrays.keys())
    lock, keep = threading.Lock(), io.takes_bfloat16(xp)

    def read(name: str) -> None:
        nonlocal num_read
        layout, parameters = layouts[name]
        stored, expected = stored_names[name], [shapes[parameter] for parameter in parameters]
        blocks = tensors.read_blocks(stored) if keep_blocks and converters.keys() >= {*parameters} else None
        x = tensors[stored].read(keep=keep) if blocks is None else blocks
        for parameter, values, shape in zip(parameters, layout.split(x, expected), expected, strict=False):
            weight = values if blocks is None else BlockWeight.of(values, shape)
            if tuple(weight.shape) != shape:
                received = f"{stored} has shape {tensors[stored].shape}, which gives {parameter} the shape"
                config = checkpoint.config_path.name
                raise CheckpointError(f"{path}: {received} {tuple(weight.shape)}; {config} implies {shape}")
            arrays[parameter] = convert(parameter, weight) if blocks is None else weight
        with lock:
            num_read += sum(map(math.prod, expected))
            if progress is not None:
                progress(num_read, num_values)

    # Other libraries have settings for each thread, such as the default device.
    with contextlib.nullcontext() if xp.name == "numpy" else run_serially():
        parallel_map(read, [name for name in layouts if name in stored_names])
    return arrays


def _initial(init: Initializer, name: str, shape: tuple[int, ...]) -> Any:
    """Return the first value of a parameter of a linear map or of a norm."""
    return init.xavier_uniform(shape) if len(shape) == 2 else init.full(shape, float(name.endswith("norm.weight")))


def save_pretrained(model: BaseModel, directory: StrPath, *, model_type: str | None = None) -> None:
    """Write a model as a checkpoint directory in the Hugging Face format.

    The directory gets config.json, model.safetensors and, for models that generate text, generation_config.json. If
    sines and cosines of positions alternate, features are written in another order, which gives the same outputs.

    Args:
        model: A model that was loaded or trained with xformer.
        directory: Directory to write to; created if necessary.
        model_type: Model type to write, e.g. "gpt2". Default: one of the family that the model was loaded from, or else
            of the first family that computes the same.

    Raises:
        ConfigError: If the model is quantized, or if no family, or not the requested one, computes the same; the error
            names the field.
        CheckpointError: If the directory cannot be written.
    """
    model = with_separate_halves(writable_model(model))
    family, values = writable_family(model, model_type)
    _write(model, family, values, Path(directory))
    path = Path(directory) / "generation_config.json"
    if isinstance(model, models.LanguageModel | models.Transformer):
        write_json(path, generation_config(model))
    else:
        path.unlink(missing_ok=True)  # of the model that was there before


def writable_model(model: Any) -> BaseModel:
    """Return a model as its floating weights; raise ConfigError if it has none, or adapters."""
    if not isinstance(model, BaseModel):
        raise ConfigError(f"model is {describe_type(model)}; expected a model, e.g. a LanguageModel")
    check_no_adapters(model)
    if dtype := quantized_dtype(model):
        raise ConfigError(f"the model is quantized to {dtype}; expected floating weights, or use model.save(path)")
    return model.unpack()


def save_with_config(model: BaseModel, config_path: Path, directory: Path) -> None:
    """Write a model that was loaded from a public checkpoint with the config.json of that checkpoint.

    Raises:
        CheckpointError: If a file cannot be read or written.
    """
    values = read_json(config_path, "configuration")
    family = family_of(values.get("model_type"), config_path)
    for key in ("torch_dtype", "quantization_config"):  # of the tensors that the model replaces
        values.pop(key, None)
    if getattr(model.config, "num_labels", 0) and family.write_config is not None:
        values |= family.write_config(model.config, values["model_type"])
    _write(model, family, values, directory)


def write_configs(gguf: Path, directory: Path) -> None:
    """Write the configuration of a GGUF file in the Hugging Face format: config.json and generation_config.json.

    Raises:
        CheckpointError: If a file cannot be read or written.
        ConfigError: If no family computes the same.
    """
    model = open_checkpoint(gguf).model
    write_json(directory / "config.json", writable_family(model, None)[1])
    write_json(directory / "generation_config.json", generation_config(model))


def _write(model: BaseModel, family: Family, values: dict[str, Any], directory: Path) -> None:
    """Write config.json and the tensors of a model."""
    model = model.unpack()
    has_output = getattr(model.config, "has_output", True)
    tensors = {name: read() for name, read in tensors_of(model, family).items()}
    for name, other in family.tied.items():  # config.json may say that a tied model is not: write both tensors
        is_copied = has_output and values.get("tie_word_embeddings") is False
        if is_copied and name not in tensors and other in tensors:
            tensors[name] = tensors[other]
    if not has_output:
        tensors = {name.removeprefix(family.prefix): x for name, x in tensors.items()}
    values = {**values, "dtype": dtype_name(first_array(model).dtype)}
    with atomic_write(directory / "config.json") as file:  # which replaces the old one right after the weights
        file.write(io.to_json(values))
        file.flush()
        save_arrays(directory / "model.safetensors", tensors, {"format": "pt"})
        remove_shards(directory)


def tensors_of(model: BaseModel, family: Family) -> dict[str, Callable[[], Any]]:
    """Return functions that return the tensors of a model, by name."""
    parameters = dict(model.named_parameters())

    def read(layout: Layout, names: tuple[str, ...]) -> Any:
        x: Any = np.asarray(layout.join([to_host(parameters[parameter]) for parameter in names]), order="C")
        is_bfloat16 = dtype_name(parameters[names[0]].dtype) == "bfloat16"
        return x.astype(resolve("numpy").dtype_named("bfloat16")) if is_bfloat16 else x

    return {name: functools.partial(read, *each) for name, each in family.layouts_of(model).items()}


def generation_config(model: BaseModel) -> dict[str, Any]:
    """Return the values of generation_config.json: special tokens and suppressed ones."""
    c = model.config
    start = "decoder_start_token_id" if isinstance(model, models.Transformer) else "bos_token_id"
    # transformers reads suppress_tokens; xformer suppresses special tokens before the softmax.
    suppressed = {"suppress_tokens": sorted(c.suppressed_ids), "suppress_special": True} if c.suppressed_ids else {}
    return {start: c.bos_id, "eos_token_id": c.eos_id, "pad_token_id": c.pad_id, **suppressed}


def writable_family(model: BaseModel, model_type: str | None, gguf: Any = None) -> tuple[Family, dict[str, Any]]:
    """Return the family to write, and the values of config.json.

    Args:
        model: The model.
        model_type: As for `save_pretrained`.
        gguf: For GGUF files, {model type: function of the values that returns those that a reader gets}.

    Raises:
        ConfigError: If no family computes the same.
    """
    requested = model.model_type if model_type is None else model_type
    has_experts = bool(getattr(model.config, "num_experts", None))
    families = [] if requested is None else [family_of(requested, "the argument")]
    # Most models are Llamas, and of the others, most programs read GPT-NeoX.
    families += [FAMILIES["llama"], FAMILIES["gpt_neox"], *FAMILIES.values()] if model_type is None else []
    misfits: list[tuple[int, str]] = []  # number of fields that differ, and which
    for family in dict.fromkeys(families):
        if type(model.config) is not family.model.config_class:
            continue
        if model_type is None and has_experts and not family.has_experts(model):
            continue
        names = family.model_types if model_type is None else (model_type,)
        for name in (name for name in names if gguf is None or name in gguf):
            try:
                values, fields = _written(family, name, model, gguf[name] if gguf else dict)
            except (CheckpointError, ConfigError) as error:
                # A combination that the family names says more than a list of many fields.
                count = _MAX_SHOWN if isinstance(error, ConfigError) and family.write_config is not None else _MANY
                misfits.append((count, f"{name}: {error}"))
                continue
            if not fields:
                return family, values
            more = f"; and {len(fields) - _MAX_SHOWN} more" if len(fields) > _MAX_SHOWN else ""
            misfits.append((len(fields), f"{name}: {'; '.join(fields[:_MAX_SHOWN])}{more}"))
    if not misfits:
        details = f"no family has models of class {type(model).__name__}{' with experts' if has_experts else ''}"
    elif model_type is None and has_experts and not gguf:
        details = _EXPERTS_HINT
    else:
        details = f"{'the nearest family is ' if model_type is None else ''}{min(misfits, key=itemgetter(0))[1]}"
    raise ConfigError(f"the model cannot be written in the {'GGUF' if gguf else 'Hugging Face'} format: {details}")


def _written(family: Family, model_type: str, model: BaseModel, stored: Any) -> tuple[dict[str, Any], list[str]]:
    """Return the values of config.json for a type, and the fields that reading it gives another value, in words.

    Raises:
        CheckpointError: If the values cannot be read.
        ConfigError: If the family cannot be written, or not with the value of a field.
    """
    if family.write_config is None:
        raise ConfigError("cannot be written")
    config, fields = model.config, []
    try:
        values = family.write_config(config, model_type)
    except ConfigError as error:
        if "activation" not in str(error):
            raise
        fields.append(str(error))  # compare the other fields with an activation of the other kind
        config = dataclasses.replace(config, activation="gelu" if config.activation in GATED else "swiglu")
        values = family.write_config(config, model_type)
    tied = family.tied if family.tied and config.tie_output else ()
    tensors = [*family.layouts_of(model, is_complete=False), *tied]
    if not getattr(config, "has_output", True):
        tensors = [name.removeprefix(family.prefix) for name in tensors if name not in tied]
    reader = ConfigReader(stored(values), Path("config.json"), tensors, tied)
    read, own = _effective_fields(family.read_config(reader)), _effective_fields(config)
    names = [name for name in own if read.get(name, own[name]) != own[name] and not (fields and name == "activation")]
    return values, fields + [f"{name} is {own[name]!r}; expected {read[name]!r}" for name in names]


def _effective_fields(config: models.ModelConfig | models.ImageTextEncoderConfig) -> dict[str, Any]:
    """Return the fields that determine what a model computes, with defaults resolved."""
    if isinstance(config, models.ImageTextEncoderConfig):
        parts = {"text": config.text, "image": config.image}
        fields = {f"{name}.{key}": x for name, part in parts.items() for key, x in _effective_fields(part).items()}
        if config.text.eos_id is not None:  # after which all is padding
            del fields["text.pad_id"]
        return {**fields, "text.eos_id": config.text.eos_id, "sigmoid": config.sigmoid}
    fields = config.to_dict()
    positions = config.positions
    has_relative_bias = positions in ("relative", "disentangled") or fields.get("relative_bias")
    windows = [config.window_of(layer) for layer in range(fields.get("num_layers", 0))] or [config.window]
    unused = {
        *("dropout", "attention_dropout", "activation_dropout", "rematerialize", "suppress_special"),
        *(() if isinstance(config, models.LanguageModelConfig | models.TransformerConfig) else ("bos_id", "eos_id")),
        *(("pad_id",) if isinstance(config, models.ImageEncoderConfig) else ()),
        *(() if positions == "sinusoidal" else ("sinusoidal_layout",)),
        *(() if positions == "alibi" else ("alibi_scale",)),
        *(() if has_relative_bias else ("relative_buckets", "relative_max_distance")),
        *(() if positions == "rotary" else ("rope_theta", "rope_scaling", "rotary_fraction", "rope_local_theta")),
        *(() if positions == "learned" else ("max_positions",)),
        *(() if any(windows) else ("rope_local_theta",)),
        *(() if config.norm == "layer" else ("norm_bias",)),
        *(() if config.qk_norm else ("qk_norm_all_heads",)),
        *(() if config.num_experts else ("num_experts_per_token", "normalize_expert_weights", "router_bias")),
        *(("d_ff",) if config.num_experts and not config.dense_layers else ()),
        *(() if fields.get("masked_lm") else ("masked_lm_activation",)),
        *(() if fields.get("masked_lm") or fields.get("pooler") not in ("none", "attention") else ("head_bias",)),
        *(() if fields.get("convolution_size") else ("convolution_activation",)),
    }
    bias, local_theta = config.attention_bias, config.rope_local_theta
    if local_theta is None and config.rope_scaling is None:
        local_theta = config.rope_theta
    resolved = {
        "num_key_value_heads": config.num_key_value_heads or config.num_heads,
        "head_dim": config.features_per_head,
        "attention_scale": config.attention_scale or config.features_per_head**-0.5,
        "attention_output_bias": bias if config.attention_output_bias is None else config.attention_output_bias,
        "key_bias": bias if config.key_bias is None else config.key_bias,
        "rope_local_theta": local_theta,
        "expert_d_ff": (config.expert_d_ff or config.d_ff) if config.num_experts else None,
        "dense_layers": sorted(set(config.dense_layers)),
        "final_norm": config.norm_position != "post" if config.final_norm is None else config.final_norm,
    }
    if isinstance(config, models.LanguageModelConfig):
        is_relative = positions in ("rotary", "alibi", "relative")
        resolved["layers_without_positions"] = sorted(set(config.layers_without_positions)) if is_relative else []
    if "num_layers" in fields:
        resolved |= {"window": windows, "layer_types": None}
    if "projection_dim" in fields:
        resolved["projection_dim"] = fields["projection_dim"] or config.d_model
    return {name: value for name, value in {**fields, **resolved}.items() if name not in unused}


def _check_supported(values: dict[str, Any], path: Path) -> None:
    """Raise CheckpointError for quantized checkpoints and those that need their own code."""
    if "quantization_config" in values:
        settings = values["quantization_config"]
        kind = settings.get("quant_method", "unknown") if isinstance(settings, dict) else "unknown"
        if kind != "mxfp4":
            raise CheckpointError(f"{path} is quantized ({kind}); expected float32, float16, bfloat16 or mxfp4 tensors")
    if "auto_map" in values and values.get("model_type") not in FAMILIES:
        raise CheckpointError(f"{path} requires custom code (auto_map in config.json), which xformer does not run")


def _tied_names(family: Family, tensors: TensorFiles) -> frozenset[str]:
    """Return the tied tensors that are absent or equal the other one; config.json may say otherwise."""
    known = {*family.tied, *family.tied.values()}
    found = {family.canonical_name(name, known): entry for name, entry in tensors.items()}
    return frozenset(
        name
        for name, other in family.tied.items()
        if not {name, other} <= found.keys() or np.array_equal(found[name].read(), found[other].read())
    )


def _check_positions(path: Path, config: Any, tensors: TensorFiles) -> None:
    """Raise CheckpointError if a table of sinusoidal positions, as of Marian and Pegasus, has other values.

    M2M100 computes its positions whatever its files have.
    """
    if getattr(config, "positions", None) != "sinusoidal" or config.sinusoidal_layout != "halves":
        return
    for name in (name for name in tensors if name.endswith("embed_positions.weight")):
        table = np.atleast_2d(np.asarray(tensors[name].read(), dtype=np.float64))
        expected: Any = sinusoidal(len(table), config.d_model, layout="halves", xp=np, dtype="float64")
        if table.shape != expected.shape or np.max(np.abs(table - expected)) > _POSITION_TOLERANCE:
            raise CheckpointError(f"{path}: {name} has values other than sinusoidal positions, which xformer computes")


def _stored_names(checkpoint: Checkpoint) -> dict[str, str]:
    """Return {name in the family's table: name in the files}; tensors of `tied` need not be used.

    With a new classifier, only those that the model uses; its own may be missing, or belong to other classes.

    Raises:
        CheckpointError: If a tensor is missing, or the model does not use a tensor of the files.
    """
    path, family, model, tensors, _, tied, is_new_head = checkpoint
    expected = family.layouts_of(model)
    known = {*expected, *family.tied}
    names = {family.canonical_name(tensor, known): tensor for tensor in tensors}
    if twice := sorted(set(tensors) - set(names.values())):
        tensor, other = twice[0], names[family.canonical_name(twice[0], known)]
        raise CheckpointError(f"{path} has the tensors {tensor} and {other}, which are the same; expected one")
    for name, other in family.tied.items():  # some files have the shared tensor only under the name of its copy
        if name in names and other in expected:
            names.setdefault(other, names[name])
    if is_new_head:
        count = model.config.num_labels
        return {
            name: names[name]
            for name, (_, parameters) in expected.items()
            if name in names and ("classifier" not in parameters[0] or tensors[names[name]].shape[0] == count)
        }
    if missing := sorted(set(expected) - names.keys()):
        received = f"{path} lacks the tensor {missing[0]} ({len(missing)} of {len(expected)} are missing)"
        raise CheckpointError(f"{received}; {nearest_hint(missing[0], sorted(names))}")
    others = [name for name in names if name not in expected and name not in tied and not family.is_ignored(name)]
    if unused := sorted(names[name] for name in others):
        received = f"{path} has the tensor {unused[0]}, which the model of its config.json does not use"
        hint = "without it, the model could give wrong outputs"
        raise CheckpointError(f"{received} ({len(unused)} such tensors); {hint}")
    return names
