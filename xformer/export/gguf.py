"""Models as GGUF files for llama.cpp, by the tables with which `families.gguf_file` reads them."""

from __future__ import annotations

import collections
import functools
import math
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from xformer.errors import ConfigError, check_choice, describe_type
from xformer.export.gguf_blocks import QUANTIZERS, quantize
from xformer.families import gguf_file
from xformer.families.checkpoint import Progress, tensors_of, writable_family, writable_model
from xformer.families.peft import PREFIX, lora_tensors
from xformer.io import StrPath, atomic_write, check_no_overwrite
from xformer.layers.positions import rope_frequencies
from xformer.layers.weights import adapters_of
from xformer.models import LanguageModel
from xformer.tokenizers import BaseTokenizer
from xformer.tokenizers.gguf import tokenizer_metadata
from xformer.tree import with_fields

Tensors = dict[str, Callable[[], Any]]

_TYPES = {name: (number, *block) for number, (name, *block) in gguf_file.TYPES.items()}  # values, bytes of a block
_FILE_TYPES = dict(zip(QUANTIZERS, (0, 1, 32, 7, 2, 3, 8, 9, 14, 16, 18), strict=True))
# What llama.cpp writes if rows are no multiple of the block
_SMALLER = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}
_KEPT = ("norm.weight", "position_embd.weight", "ffn_gate_inp.weight")  # not quantized
_FLOATS = ("epsilon", "freq_base", "freq_base_swa", "softcapping", "factor", "beta_fast", "beta_slow", "alpha")


def export_gguf(
    model: Any,
    path: StrPath,
    *,
    tokenizer: BaseTokenizer | None = None,
    quantization: str | None = None,
    source: StrPath | None = None,
    progress: Progress | None = None,
) -> str:
    """Write a language model as a GGUF file, which llama.cpp and `load_pretrained` read.

    Args:
        model: The `LanguageModel`, without adapters; see `merge_lora`. None: that of the source, of which memory then
            holds one tensor at a time.
        path: File to write.
        tokenizer: Its tokenizer; without one, the file is for token ids only.
        quantization: Type of the matrices, such as "Q8_0"; norms, positions and routers keep theirs. Default: the types
            of the source, or else F32. Matrices whose rows are no multiple of the block get the
            type that llama.cpp gives them.
        source: GGUF file that the model was loaded from, whose metadata is copied, with the tokenizer. Tensors that
            did not change keep their bytes.
        progress: Called after each tensor with the number of tensors written so far and their total.

    Returns:
        A phrase about the types.

    Raises:
        ConfigError: If no architecture of GGUF files computes the same, its tokenizers give other tokens, the type is
            unknown, or the file would replace its source.
        CheckpointError: If a file cannot be read or written.
    """
    if source is None:
        model = writable_model(model)
        values, label, architecture = _described(model)
        metadata = {"tokenizer.ggml.model": "none"}
        if tokenizer is not None:
            metadata = tokenizer_metadata(tokenizer, values["vocab_size"], label)
        metadata |= {"general.name": Path(path).stem, **_metadata(values, label, architecture)}
        tensors = _rope_tensors(model.config) | tensors_of(model, architecture.family)
        if label == "olmoe":  # without which llama.cpp does not load it
            tensors.setdefault("output.weight", tensors["token_embd.weight"])
        return _write(path, _fields(metadata), tensors, {}, quantization or "F32", progress)
    check_no_overwrite(path, [source], "the output")
    _, entries, places = gguf_file.read_header(Path(source))
    content, tensors = np.memmap(source, "u1", "r"), {key: entry.read for key, entry in entries.items()}
    if model is not None:
        own = tensors_of(writable_model(model), gguf_file.GGUFFile(Path(source)).architecture.family)
        if "output.weight" in entries:  # maybe a copy of the embedding
            own.setdefault("output.weight", own["token_embd.weight"])
        for key, read in own.items():
            if key not in entries or entries[key].shape != read().shape:
                raise ConfigError(f"{source} has no {key} of shape {read().shape}, as the model has; expected its file")
        tensors |= own
    fields = {key: content[place].tobytes() for key, place in places.items()}
    return _write(path, fields, tensors, entries, quantization, progress)


def export_gguf_lora(model: Any, path: StrPath) -> str:
    """Write the adapters of a model as a GGUF file, which llama.cpp adds to the base model.

    Args:
        model: A model with adapters; see `xformer.lora`.
        path: File to write.

    Returns:
        As `export_gguf`.

    Raises:
        ConfigError: If the model has no adapters, or some that llama.cpp does not have.
        CheckpointError: If the file cannot be written.
    """
    for name, adapter in adapters_of(model).items():
        if ".experts." in name or adapter.magnitude is not None:
            received = f"the adapter of {name} is that of an expert, or has a magnitude"
            raise ConfigError(f"{received}, which llama.cpp does not read; use merge_lora and export_gguf")
    plain = with_fields(type(model)(model.config, seed=None), model_type=model.model_type)  # takes no memory
    _, label, architecture = _described(plain)
    adapters, settings = lora_tensors(model, architecture.family)
    alpha = max(alpha for _, alpha in settings.values())
    tensors: Tensors = {}
    for key, x in adapters.items():
        module, _, kind = key.removeprefix(PREFIX).removesuffix(".weight").rpartition(".lora_")
        if kind == "B":
            x = x * (settings[module][1] / alpha)  # the file has one alpha
        tensors[f"{module}.weight.lora_{kind.lower()}"] = functools.partial(np.asarray, x)
    metadata = {"general.type": "adapter", "general.architecture": label, "adapter.type": "lora"}
    return _write(path, _fields({**metadata, "adapter.lora.alpha": alpha}), tensors, {}, "F32", None)


# --- Names and metadata -----------------------------------------------------------------------------------------------


def _described(model: Any) -> tuple[dict[str, Any], str, gguf_file.Architecture]:
    """Return the values of config.json of a model, and its architecture in GGUF files, first its name."""
    if not isinstance(model, LanguageModel):
        raise ConfigError(f"model is {describe_type(model)}; GGUF files expect a LanguageModel")
    by_type = {str(each.model_type): (name, each) for name, each in gguf_file.ARCHITECTURES.items()}
    by_type["mixtral"] = "llama", by_type["mixtral"][1]

    def stored(values: dict[str, Any]) -> dict[str, Any]:
        """Return the values that reading a file gives; tensors show the others."""
        rope, (name, architecture) = _rope(values), by_type[values["model_type"]]
        read = gguf_file.translate_metadata(_metadata(values, name, architecture), architecture, {}, Path())
        read |= {key: value for key, value in values.items() if key.endswith(("_bias", "_id", "_embeddings", "_size"))}
        is_in_tensors = rope.get("rope_type") == {"llama": "llama3", "phi3": "longrope"}.get(name, "")
        return read | ({"rope_scaling": rope} if is_in_tensors else {}) | architecture.fixed(values)

    values = writable_family(model, None, dict.fromkeys(by_type, stored))[1]
    name, architecture = by_type[values["model_type"]]
    if architecture.is_tied and not model.config.tie_output:
        raise ConfigError(f"tie_output is False; GGUF files of {name} expect True")
    return values, name, architecture


def _rope(values: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of rotary positions, of layers without a window."""
    rope = values.get("rope_parameters", {})
    return dict(rope.get("full_attention", rope))


def _metadata(values: dict[str, Any], name: str, architecture: gguf_file.Architecture) -> dict[str, Any]:
    """Return the metadata of values of config.json."""
    rope, local = _rope(values), values.get("rope_parameters", {}).get("sliding_attention", {})
    values = {**values, "rope_theta": rope.get("rope_theta"), "rope_local_base_freq": local.get("rope_theta")}
    found = {key: values[own] for key, own in architecture.keys.items() if values.get(own) is not None}
    found["vocab_size"], rope_type = values["vocab_size"], rope.get("rope_type")
    if name == "phi3" and values.get("sliding_window"):  # llama.cpp has no windows here: texts that fit into one
        found["context_length"] = min(found["context_length"], values["sliding_window"])
    if rope:
        found["attention.value_length"] = values["head_dim"]
        found["rope.dimension_count"] = int(values["head_dim"] * values.get("partial_rotary_factor", 1.0))
    if rope_type in ("linear", "yarn"):
        found |= {key: rope[own] for key, own in gguf_file.ROPE_KEYS.items() if own in rope}
        found["rope.scaling.type"] = rope_type
    if rope_type == "longrope":
        found["rope.scaling.attn_factor"] = rope_frequencies(2 * len(rope["long_factor"]), 1e4, rope, 1)[1]
    if rope_type in ("yarn", "longrope"):
        found["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
    return {"general.architecture": name, **{f"{name}.{key}": value for key, value in found.items()}}


def _rope_tensors(config: Any) -> Tensors:
    """Return the factors of the wavelengths of rotary positions that the metadata does not have."""
    scaling = (config.rope_scaling if config.positions == "rotary" else None) or {}
    factors = {f"rope_factors_{key[:-7]}": x for key, x in scaling.items() if key in ("long_factor", "short_factor")}
    if scaling.get("rope_type") == "llama3":
        features = int(config.features_per_head * config.rotary_fraction)
        plain, scaled = (rope_frequencies(features, config.rope_theta, each, 1)[0] for each in (None, scaling))
        factors = {"rope_freqs": plain / scaled}
    return {f"{key}.weight": functools.partial(np.asarray, x) for key, x in factors.items()}


# --- Writing ----------------------------------------------------------------------------------------------------------


def _fields(metadata: dict[str, Any]) -> dict[str, bytes]:
    """Return the bytes of keys and their values."""
    values = {key: _value(float(x) if key.endswith(_FLOATS) else x) for key, x in metadata.items()}
    return {key: _value(key)[1] + struct.pack("<I", kind) + data for key, (kind, data) in values.items()}


def _value(value: Any, integer: tuple[int, str] = (4, "<I")) -> tuple[int, bytes]:
    """Return the number of the type of a value, and its bytes; integers in lists are signed."""
    if isinstance(value, str):
        return 8, struct.pack("<Q", len(value.encode())) + value.encode()
    if isinstance(value, list):
        items = [_value(each, (5, "<i")) for each in value]
        return 9, struct.pack("<IQ", items[0][0] if items else 8, len(items)) + b"".join(data for _, data in items)
    kind, code = (7, "<?") if isinstance(value, bool) else (6, "<f") if isinstance(value, float) else integer
    return kind, struct.pack(code, value)


def _write(path: Any, fields: dict[str, bytes], tensors: Tensors, entries: Any, code: str | None, progress: Any) -> str:
    """Write a file, with the entries of its source, and return a phrase about the types."""
    if code is not None:
        check_choice("quantization", code, QUANTIZERS)
        fields |= _fields({"general.file_type": _FILE_TYPES[code], "general.quantization_version": 2})
    header, offset, codes = b"", 0, {}
    alignment = struct.unpack("<I", fields.get("general.alignment", b"\x20\0\0\0")[-4:])[0]
    names: collections.Counter[str] = collections.Counter()
    for key, read in tensors.items():
        entry = entries.get(key)
        shape = read().shape if entry is None else entry.shape
        is_kept = len(shape) == 1 or key.endswith(_KEPT)
        wanted: Any = entry.code if entry and (is_kept or code is None) else "F32" if is_kept else code
        wanted = wanted if wanted in QUANTIZERS or _is_same(read(), entry) else "Q4_1"
        choices = wanted, _SMALLER.get(wanted, "F16"), "F16"
        codes[key] = code_of = next(each for each in choices if shape[-1] % _TYPES[each][1] == 0)
        names[code_of if code_of == wanted else f"{code_of}, as their rows do not fit {wanted}"] += 1
        number, num_values, num_bytes = _TYPES[code_of]
        header += _value(key)[1] + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape[::-1], number, offset)
        offset += -(-math.prod(shape) // num_values * num_bytes // alignment) * alignment
    header = struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(fields)) + b"".join(fields.values()) + header
    with atomic_write(path) as file:
        file.write(header + bytes(-len(header) % alignment))
        for done, (key, read) in enumerate(tensors.items(), 1):
            x, entry = read(), entries.get(key)
            is_same = entry and entry.code == codes[key] and _is_same(x, entry)
            data: Any = entry.stored() if is_same else quantize(x, codes[key])
            file.writelines((data, bytes(-len(data) % alignment)))
            if progress is not None:
                progress(done, len(tensors))
    return "tensors: " + "; ".join(f"{count} in {name}" for name, count in names.items())


def _is_same(x: Any, entry: Any) -> bool:
    y = entry.read()
    return bool(((x == y) | ((x != x) & (y != y))).all())  # array_equal copies both for its equal_nan
