"""`GGUFFile`: a GGUF file of llama.cpp, with the config.json of a family and its own table of tensors.

The format is specified in docs/gguf.md of ggml. The header is read here, because the GGUFReader of the package gguf
makes several arrays for every token of the vocabulary: seconds, and 170 MB for 49,000 tokens.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import mmap
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from xformer.errors import CheckpointError, nearest_hint
from xformer.families.family import FAMILIES, Family, Tensors
from xformer.families.layouts import affine, attention, feed_forward, fused, same, stacked_experts, transposed
from xformer.families.tensor_files import TensorEntry, TensorFiles
from xformer.io import check_no_lfs_pointer
from xformer.models import LanguageModelConfig
from xformer.ops.blocks import dequantize

# {number of a type: its name, and the values and bytes of a block}.
TYPES = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 30: ("BF16", 1, 2), 8: ("Q8_0", 32, 34), 2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22), 7: ("Q5_1", 32, 24), 12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210), 20: ("IQ4_NL", 32, 18), 10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110),
}  # fmt: skip
QUANTIZED = tuple(name for name, num_values, _ in TYPES.values() if num_values > 1)[:-3]  # that stay in blocks
_UNSUPPORTED = {
    16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 21: "IQ3_S", 22: "IQ2_S",
    23: "IQ4_XS", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4", 41: "Q1_0",
}  # fmt: skip
_IQ4_NL = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], "i1").view("u1")
_SIZE = struct.Struct("<Q")

# {type of a metadata value: code of the struct module}; strings are type 8 and arrays type 9.
_CODES = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_FLOAT32, _STRING, _ARRAY = 6, 8, 9
Values = dict[str, Any]  # of the metadata, or of a config.json


_LAYER, _ATTENTION, _NETWORK = "blk.{i}", "layers.{i}.self_attention", "layers.{i}.feed_forward"
# {norm: parameter}
_NORMS = {
    "output_norm": "norm",
    f"{_LAYER}.attn_q_norm": f"{_ATTENTION}.query_norm",
    f"{_LAYER}.attn_k_norm": f"{_ATTENTION}.key_norm",
    f"{_LAYER}.attn_norm": f"{_ATTENTION}_residual.norm",
    f"{_LAYER}.post_attention_norm": f"{_ATTENTION}_residual.norm_after",
    f"{_LAYER}.ffn_norm": f"{_NETWORK}_residual.norm",
    f"{_LAYER}.post_ffw_norm": f"{_NETWORK}_residual.norm_after",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Architecture:
    """Keys and tensors of a GGUF architecture.

    Attributes:
        keys: {metadata key without the architecture: key of config.json}.
        is_interleaved: Whether queries and keys are permuted so that rotary positions rotate adjacent features.
        fused: {tensor of a layer: the tensors that it replaces}, e.g. {"attn_qkv": "attn_q attn_k attn_v"}.
        is_tied: Whether the embedding is the output matrix of all models.
        model_type: Model type of the family; default the name.
        defaults: Function of the values of config.json that returns values of keys that the file may omit.
        fixed: Function of the values of config.json that returns those with which llama.cpp computes in any case.
    """

    keys: Mapping[str, str]
    is_interleaved: bool = False
    fused: Mapping[str, str] = dataclasses.field(default_factory=dict)
    is_tied: bool = False
    model_type: str = ""
    defaults: Callable[[Values], Values] = dataclasses.field(default=lambda config: {})
    fixed: Callable[[Values], Values] = dataclasses.field(default=lambda config: {})

    @property
    def family(self) -> Family:
        """The family of the model type, with the names and layouts of the tensors in GGUF files."""
        tied, family = {"output.weight": "token_embd.weight"}, FAMILIES[self.model_type]
        return dataclasses.replace(family, tensors=self.tensors, prefix="", tied=tied, ignored=())

    def tensors(self, config: LanguageModelConfig) -> Tensors:
        """Return the table of tensors."""
        rotated = (config.features_per_head,) * 2 if self.is_interleaved else None
        table = {
            "token_embd.weight": same("embedding.weight"),
            "position_embd.weight": same("input.positions.weight"),
            "output.weight": transposed("output.weight"),
            f"{_LAYER}.ffn_gate_inp.weight": transposed(f"{_NETWORK}.router"),
            **attention(_LAYER, _ATTENTION, "attn_q attn_k attn_v attn_output", rotated=rotated),
            **feed_forward(_LAYER, _NETWORK, "ffn_gate ffn_up ffn_down"),
        }
        for norm, parameter in _NORMS.items():
            table |= affine(norm, parameter)
        for part in ("gate", "up", "down"):
            experts = stacked_experts(config.num_experts, f"{_NETWORK}.experts.{{e}}.{part}.weight", transpose=True)
            table[f"{_LAYER}.ffn_{part}_exps.weight"] = experts
        for tensor, names in self.fused.items():
            for kind in ("weight", "bias"):
                parts = [table.pop(f"{_LAYER}.{name}.{kind}") for name in names.split()]
                table[f"{_LAYER}.{tensor}.{kind}"] = fused(*(each.parameters[0] for each in parts))
        return table


_EXPERT_KEYS = {"expert_count": "num_experts", "expert_used_count": "num_experts_per_tok"}
_QKV = {"attn_qkv": "attn_q attn_k attn_v"}
_KEYS = {
    "context_length": "max_position_embeddings", "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size", "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads", "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim", "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.causal": "is_causal", "rope.freq_base": "rope_theta",
}  # fmt: skip
_GPT2_KEYS = {
    "context_length": "n_positions", "embedding_length": "n_embd", "feed_forward_length": "n_inner",
    "block_count": "n_layer", "attention.head_count": "n_head", "attention.layer_norm_epsilon": "layer_norm_epsilon",
    "attention.causal": "is_causal",
}  # fmt: skip
# Of linear and yarn scaling
ROPE_KEYS = {f"rope.scaling.{key}": key.removeprefix("yarn_") for key in ("factor", "yarn_beta_fast", "yarn_beta_slow")}
_WINDOW_KEYS = {"attention.sliding_window": "sliding_window"}
_GEMMA_KEYS = _KEYS | _WINDOW_KEYS | {
    "attn_logit_softcapping": "attn_logit_softcapping", "final_logit_softcapping": "final_logit_softcapping",
    "rope.freq_base_swa": "rope_local_base_freq",
}  # fmt: skip


def _gemma_scale(config: dict[str, Any], num_layers_27b: int) -> dict[str, Any]:
    """Return the scale of attention, which llama.cpp does not store: that of 27B depends on d_model."""
    if config.get("num_hidden_layers") == num_layers_27b:
        return {"query_pre_attn_scalar": config.get("hidden_size", 0) // (config.get("num_attention_heads") or 1)}
    return {"query_pre_attn_scalar": config.get("head_dim")}


def _usual_heads(config: dict[str, Any]) -> dict[str, Any]:
    return {"head_dim": config["hidden_size"] // config["num_attention_heads"]}


# By name. Mixtral has the name of Llama.
ARCHITECTURES = {
    "gemma2": Architecture(
        keys=_GEMMA_KEYS,
        is_tied=True,
        defaults=lambda config: (
            {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0} | _gemma_scale(config, 46)
        ),
        fixed=lambda config: {"attention_bias": False, "is_causal": True},
    ),
    "gemma3": Architecture(
        keys=_GEMMA_KEYS,
        model_type="gemma3_text",
        defaults=lambda config: _gemma_scale(config, 62),
        fixed=lambda config: {"attention_bias": False, "is_causal": True, "attn_logit_softcapping": None},
    ),
    "llama": Architecture(keys=_KEYS, is_interleaved=True),
    "qwen2": Architecture(keys=_KEYS, fixed=_usual_heads),
    "qwen3": Architecture(keys=_KEYS),
    "mixtral": Architecture(keys={**_KEYS, **_EXPERT_KEYS, "expert_count": "num_local_experts"}, is_interleaved=True),
    "qwen3moe": Architecture(
        keys={**_KEYS, **_EXPERT_KEYS, "expert_feed_forward_length": "moe_intermediate_size"},
        model_type="qwen3_moe",
        defaults=lambda config: {"norm_topk_prob": True},
        fixed=lambda config: {"attention_bias": False},
    ),
    "olmoe": Architecture(
        keys={**_KEYS, **_EXPERT_KEYS},
        fixed=lambda c: {**_usual_heads(c), "num_key_value_heads": c["num_attention_heads"], "attention_bias": False},
    ),
    "phi3": Architecture(keys=_KEYS | _WINDOW_KEYS, fused=_QKV | {"ffn_up": "ffn_gate ffn_up"}, fixed=_usual_heads),
    "gpt2": Architecture(keys=_GPT2_KEYS, fused=_QKV),
}
ARCHITECTURES = {name: dataclasses.replace(x, model_type=x.model_type or name) for name, x in ARCHITECTURES.items()}

# Metadata that does not change what a model computes.
_IGNORED = ("general.", "tokenizer.", "quantize.", "split.")
_HARMLESS = ("vocab_size", "tensor_data_layout", "rope.scaling.finetuned")


@dataclasses.dataclass(frozen=True)
class GGUFEntry(TensorEntry):
    """Position of a tensor in a GGUF file, its type, and its shape after dequantization.

    Attributes:
        block: Values and bytes of one block of the type.
    """

    block: tuple[int, int] = (1, 4)

    def read(self, *, keep: bool = False) -> Any:
        """Return the tensor; quantized types become float32, and bfloat16 unless it is to be kept."""
        if self.block[0] == 1:
            return super().read(keep=keep)
        return dequantize(self.read_blocks()).reshape(self.shape)

    def stored(self, content: Any = None) -> Any:
        """Return the bytes of the tensor in those of the file."""
        num_bytes = math.prod(self.shape) // self.block[0] * self.block[1]
        content = np.memmap(self.path, "u1", mode="r") if content is None else content
        return np.asarray(content[self.offset :][:num_bytes])

    def read_blocks(self, content: Any = None) -> Any:
        """Return the part of the bytes of the file that has the quantized blocks: (blocks, 1, bytes of a block).

        Blocks of IQ4_NL become those of Q8_0, and blocks of Q3_K those of Q6_K, which can represent the same values.
        """
        blocks = self.stored(content).reshape(-1, 1, self.block[1])
        convert = {"IQ4_NL": _iq4_nl_as_q8_0, "Q3_K": _q3_k_as_q6_k}.get(self.code)
        return blocks if convert is None else convert(blocks)


def _iq4_nl_as_q8_0(blocks: Any) -> Any:
    values = np.concatenate([blocks[..., 2:] & 15, blocks[..., 2:] >> 4], axis=-1)
    return np.concatenate([blocks[..., :2], _IQ4_NL[values]], axis=-1)


def _q3_k_as_q6_k(blocks: Any) -> Any:
    """Convert 16 groups of values from -4 to 3, and their scales of 6 bits."""
    high, low, scales, factor = np.split(blocks, (32, 96, 108), axis=-1)
    steps = np.arange(8, dtype="u1")[:, None]
    values = (low.reshape(-1, 2, 1, 32) >> steps[::2] & 3 | (high >> steps & 1).reshape(-1, 2, 4, 32) << 2) + 28
    four_bits = values.reshape(-1, 2, 2, 64) & 15
    low, high = four_bits[:, :, 0] | four_bits[:, :, 1] << 4, np.bitwise_or.reduce(values >> 4 << steps[::2], axis=2)
    low_scales, high_scales = scales[..., :8] >> steps[::4] & 15, scales[..., 8:] >> steps[::2] & 3
    scales = (low_scales.reshape(-1, 16) | high_scales.reshape(-1, 16) << 4) - 32
    return np.concatenate([each.reshape(len(blocks), 1, -1) for each in (low, high, scales, factor)], axis=-1)


class GGUFFile(TensorFiles):
    """The tensors of a GGUF file, dequantized one at a time or in blocks.

    Args:
        path: The file.

    Attributes:
        config: Values of config.json for the family. Other metadata keeps its name, so that the family refuses it.
        metadata: All metadata by key.
        architecture: Keys and tensors of the architecture.

    Raises:
        CheckpointError: If the file is damaged, of an unknown architecture, or has tensors of an unsupported type.
    """

    def __init__(self, path: Path) -> None:
        self.metadata, stored, _ = read_header(path)
        self._content = np.memmap(path, "u1", mode="r")  # of all weights in blocks, as it has a file descriptor
        if self.metadata.get("split.count", 1) > 1:
            count = self.metadata["split.count"]
            raise CheckpointError(f"{path} is one of {count} parts; merge them with llama-gguf-split --merge")
        name = self.metadata.get("general.architecture")
        if name not in ARCHITECTURES:
            raise CheckpointError(f"{path} has the architecture {name!r}; {nearest_hint(str(name), ARCHITECTURES)}")
        if "token_embd.weight" not in stored:
            raise CheckpointError(f"{path} lacks the tensor token_embd.weight; expected a language model")
        model_type = "mixtral" if name == "llama" and self.metadata.get("llama.expert_count") else name
        self.architecture = ARCHITECTURES[model_type]
        self.update(stored)
        self.config = {
            "vocab_size": stored["token_embd.weight"].shape[0],
            "tie_word_embeddings": "output.weight" not in stored,  # llama.cpp then uses the embedding
            **translate_metadata(self.metadata, self.architecture, self, path),
        }

    def read_blocks(self, name: str) -> Any:
        """Return matrices as an array of quantized blocks (..., rows, blocks of a row) in the file, or None."""
        entry: Any = self[name]
        num_values, _ = entry.block
        if num_values == 1 or entry.code == "Q2_K" or len(entry.shape) < 2 or entry.shape[-1] % num_values:
            return None
        blocks = entry.read_blocks(self._content)
        blocks = blocks.view(f"V{blocks.shape[-1]}")
        return blocks.reshape(*entry.shape[:-1], entry.shape[-1] // num_values)


def find_gguf(path: Path) -> Path | None:
    """Return the path itself if it is a GGUF file, or the only one of a directory without safetensors, else None.

    Raises:
        CheckpointError: If the directory has several.
    """
    if path.is_file():
        return path if path.suffix == ".gguf" else None
    files = sorted(path.glob("*.gguf"))
    if not files or any(path.glob("*.safetensors")):
        return None
    if len(files) > 1:
        raise CheckpointError(f"{path} has {len(files)} GGUF files, {files[0].name} first; load one by its path")
    return files[0]


def read_metadata(path: Path) -> dict[str, Any]:
    """Return the metadata of a GGUF file: {key: number, string or list}."""
    return read_header(path)[0]


# --- Configuration ----------------------------------------------------------------------------------------------------


def translate_metadata(metadata: Values, architecture: Architecture, tensors: dict[str, Any], path: Path) -> Values:
    """Return the values of config.json; metadata without a counterpart keeps its name.

    Args:
        metadata: All metadata by key.
        architecture: The architecture.
        tensors: Tensors by name, which loses those of positions.
        path: The file, for errors.

    Raises:
        CheckpointError: If layers differ in what xformer expects to be the same.
    """
    name = metadata["general.architecture"]
    values = {
        key.removeprefix(f"{name}."): value
        for key, value in metadata.items()
        if not key.startswith(_IGNORED) and key.removeprefix(f"{name}.") not in _HARMLESS
    }
    for key in architecture.keys.keys() & values.keys():
        by_layer = values[key] if isinstance(values[key], list) else [values[key]]
        if len(set(by_layer)) != 1:
            raise CheckpointError(f"{path} has different values of {name}.{key} by layer; expected the same")
        values[key] = by_layer[0]
    special = {"bos": "bos", "eos": "eos", "pad": "padding"}
    ids = {f"{role}_token_id": metadata.get(f"tokenizer.ggml.{key}_token_id") for role, key in special.items()}
    translated = _translate(values, architecture.keys, tensors)
    translated |= {**ids, **{f"{name}.{key}": value for key, value in values.items()}}
    return {"model_type": architecture.model_type, **architecture.defaults(translated), **translated}


def _translate(values: dict[str, Any], keys: Mapping[str, str], tensors: dict[str, Any]) -> dict[str, Any]:
    """Return values of config.json, and remove the metadata and tensors that they replace."""
    config = {new: values.pop(old) for old, new in keys.items() if old in values}
    if config.get("sliding_window") == 0:  # none
        del config["sliding_window"]
    biases = {"attention_bias": "blk.0.attn_q.bias", "mlp_bias": "blk.0.ffn_gate.bias"}
    config |= {key: True for key, tensor in biases.items() if tensor in tensors}
    head_dim = config.get("head_dim") or config.get("hidden_size", 0) // (config.get("num_attention_heads") or 1)
    if values.get("attention.value_length") == head_dim:
        del values["attention.value_length"]
    rotated = values.pop("rope.dimension_count", head_dim)
    if rotated != head_dim:
        config["partial_rotary_factor"] = rotated / max(head_dim, 1)
    original = values.pop("rope.scaling.original_context_length", config.get("max_position_embeddings"))
    if rope := _translate_rope(values, tensors):
        is_linear = rope["rope_type"] == "linear"
        config["rope_scaling"] = rope if is_linear else {**rope, "original_max_position_embeddings": original}
    return config


def _translate_rope(values: dict[str, Any], tensors: dict[str, Any]) -> dict[str, Any]:
    """Return the scaling of rotary positions, and remove the metadata and tensors that it replaces."""
    rope_type = values.get("rope.scaling.type")
    if "rope_freqs.weight" in tensors:  # divisors of the frequencies, which the converter computed for Llama 3
        divisors = tensors.pop("rope_freqs.weight").read().tolist()
        return {
            "rope_type": "longrope", "short_factor": divisors, "long_factor": divisors, "factor": 1.0,
            "attention_factor": 1.0,
        }  # fmt: skip
    if {"rope_factors_short.weight", "rope_factors_long.weight"} <= tensors.keys():
        values.pop("rope.scaling.type", None)
        return {
            "rope_type": "longrope",
            "short_factor": tensors.pop("rope_factors_short.weight").read().tolist(),
            "long_factor": tensors.pop("rope_factors_long.weight").read().tolist(),
            "attention_factor": values.pop("rope.scaling.attn_factor", None),
        }
    if rope_type in ("linear", "yarn") and "rope.scaling.factor" in values:
        del values["rope.scaling.type"]
        return {"rope_type": rope_type} | {new: values.pop(old) for old, new in ROPE_KEYS.items() if old in values}
    if rope_type == "none":
        del values["rope.scaling.type"]
    return {}


# --- Header -----------------------------------------------------------------------------------------------------------


Header = tuple[dict[str, Any], dict[str, GGUFEntry], dict[str, slice]]


def read_header(path: Path) -> Header:
    """Return the metadata, the tensors by their names in the file, and where the bytes of each key and value are.

    Raises:
        CheckpointError: If the file is damaged, or has tensors of an unsupported type.
    """
    try:
        status = path.stat()
        metadata, entries, places = _read_unchanged(path, status.st_mtime_ns, status.st_size)
        return metadata, {**entries}, places
    except (struct.error, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} is damaged or truncated ({error}); use another copy") from error
    except (OSError, ValueError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"cannot read {path}: {error}") from error


@functools.lru_cache(maxsize=1)  # the model and its tokenizer read the same header
def _read_unchanged(path: Path, modified: int, size: int) -> Header:
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return _parse(_Cursor(content), path)


def _parse(cursor: _Cursor, path: Path) -> Header:
    if cursor.content[:4] != b"GGUF":
        check_no_lfs_pointer(path)
        raise CheckpointError(f"{path} is not a GGUF file; its first bytes are {cursor.content[:4]!r}")
    cursor.position = 4
    version = cursor.number("I")
    if version not in (2, 3):
        raise CheckpointError(f"{path} has the GGUF version {version}; expected 2 or 3, little-endian")
    num_tensors, num_keys = cursor.number("Q"), cursor.number("Q")
    metadata, places = {}, {}
    for _ in range(num_keys):
        first, key = cursor.position, cursor.string()
        metadata[key] = cursor.value(cursor.number("I"))
        places[key] = slice(first, cursor.position)
    tensors = []
    for _ in range(num_tensors):
        name = cursor.string()
        shape = tuple(cursor.number("Q") for _ in range(cursor.number("I")))[::-1]
        tensors.append((name, shape, cursor.number("I"), cursor.number("Q")))
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1:
        raise struct.error(f"general.alignment is {alignment!r}")
    start = -(-cursor.position // alignment) * alignment
    entries = {}
    for name, shape, type_id, offset in tensors:
        if type_id not in TYPES:
            code, supported = _UNSUPPORTED.get(type_id, f"number {type_id}"), [each[0] for each in TYPES.values()]
            raise CheckpointError(f"{path}: {name} has the type {code}; expected one of {', '.join(supported)}")
        code, *block = TYPES[type_id]
        num_blocks, remainder = divmod(int(np.prod(shape, dtype=object)), block[0])
        if remainder or start + offset + num_blocks * block[1] > len(cursor.content):
            raise CheckpointError(f"{path} is damaged or truncated: {name} ends after the file; use another copy")
        entries[name] = GGUFEntry(path, code, shape, start + offset, (block[0], block[1]))
    return metadata, entries, places


class _Cursor:
    """A position in the header; reading moves it."""

    def __init__(self, content: mmap.mmap) -> None:
        self.content, self.position = content, 0

    def number(self, code: str) -> Any:
        return self.numbers(code, 1)[0]

    def numbers(self, code: str, length: int) -> list[Any]:
        form = f"<{length}{code}"
        values = struct.unpack_from(form, self.content, self.position)
        self.position += struct.calcsize(form)
        return list(values)

    def string(self) -> str:
        return self.strings(1)[0]

    def strings(self, length: int) -> list[str]:
        # A vocabulary has hundreds of thousands, so the loop has no other calls.
        content, position, texts = self.content, self.position, []
        end, read_size = len(content), _SIZE.unpack_from
        for _ in range(length):
            start = position + 8
            position = start + read_size(content, position)[0]
            if position > end:
                raise struct.error("a string ends after the file")
            texts.append(content[start:position].decode())
        self.position = position
        return texts

    def value(self, type_id: int) -> Any:
        is_array, length = type_id == _ARRAY, 1
        if is_array:
            type_id, length = self.number("I"), self.number("Q")
        if not (type_id == _STRING or type_id in _CODES) or length > len(self.content):
            raise struct.error(f"a value has {length} elements of the type {type_id}")
        values = self.strings(length) if type_id == _STRING else self.numbers(_CODES[type_id], length)
        if is_array:
            return values
        # 1e-5 is stored as the nearest float32; the shortest decimal that rounds to it is 1e-5 again.
        return float(str(np.float32(values[0]))) if type_id == _FLOAT32 else values[0]
