"""Conversion of a Whisper model of CTranslate2 (binary version 6) to a Hugging Face directory, for tests."""

import io
import json
import shutil
import struct

import numpy as np
from safetensors.numpy import save_file

DTYPES = ("<f4", "i1", "<i2", "<i4", "<f2")
# Name in a layer of CTranslate2: names of transformers, whose tensors it concatenates by rows.
LINEARS = {
    "self_attention/linear_0": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "self_attention/linear_1": ("self_attn.out_proj",), "attention/linear_0": ("encoder_attn.q_proj",),
    "attention/linear_1": ("encoder_attn.k_proj", "encoder_attn.v_proj"),
    "attention/linear_2": ("encoder_attn.out_proj",), "ffn/linear_0": ("fc1",), "ffn/linear_1": ("fc2",),
}  # fmt: skip
NORMS = {"self_attention": "self_attn_layer_norm", "attention": "encoder_attn_layer_norm", "ffn": "final_layer_norm"}
SIZES = {"layers": 4, "attention_heads": 6, "ffn_dim": 1536}
SPECIAL = {"pad_token_id": 50256, "bos_token_id": 50257, "eos_token_id": 50256, "decoder_start_token_id": 50257}


def read_binary(path):
    """Return the variables of a model.bin by name."""
    file = io.BytesIO(path.read_bytes())

    def number(code):
        return struct.unpack(f"<{code}", file.read(struct.calcsize(f"<{code}")))[0]

    def string():
        return file.read(number("H"))[:-1].decode()

    assert (number("I"), string(), number("I")) == (6, "WhisperSpec", 3)
    variables = {}
    for _ in range(number("I")):
        name, shape = string(), [number("I") for _ in range(number("B"))]
        dtype, size = DTYPES[number("B")], number("I")
        variables[name] = np.frombuffer(file.read(size), dtype).reshape(shape)
    return variables


def tensor_names(name):
    """Return the names that transformers has for a variable."""
    side, *parts = name.split("/")
    path = "/".join(parts).replace("gamma", "weight").replace("beta", "bias")
    if not path.startswith("layer_") or path.startswith("layer_norm"):
        path = path.replace("position_encodings/encodings", "embed_positions.weight")
        return [f"model.{side}.{path.replace('embeddings', 'embed_tokens').replace('/', '.')}"]
    layer, block, *_ = parts
    prefix, end = f"model.{side}.layers.{layer.removeprefix('layer_')}", path.rsplit("/", 1)[1]
    if parts[2] == "layer_norm":
        return [f"{prefix}.{NORMS[block]}.{end}"]
    return [f"{prefix}.{each}.{end}" for each in LINEARS[f"{block}/{parts[2]}"]]


def convert(source, target):
    """Write Whisper tiny.en as a directory that transformers and xformer read, in float32."""
    tensors = {}
    for name, x in read_binary(source / "model.bin").items():
        if x.dtype == np.float16:  # others are settings
            names = tensor_names(name)
            tensors |= dict(zip(names, np.split(x.astype(np.float32), len(names)), strict=True))
    for name in [name for name in tensors if name.endswith("k_proj.bias")]:
        assert not tensors.pop(name).any()
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    config = {
        "model_type": "whisper", "vocab_size": 51864, "d_model": 384,
        **{f"{side}_{key}": value for side in ("encoder", "decoder") for key, value in SIZES.items()}, **SPECIAL,
    }  # fmt: skip
    (target / "config.json").write_text(json.dumps(config))
    settings = json.loads((source / "config.json").read_text())
    generation = {
        **SPECIAL, "suppress_tokens": settings["suppress_ids"], "begin_suppress_tokens": settings["suppress_ids_begin"],
        "is_multilingual": False, "alignment_heads": settings["alignment_heads"], "max_length": 448,
    }  # fmt: skip
    (target / "generation_config.json").write_text(json.dumps(generation))
    shutil.copy(source / "tokenizer.json", target)
