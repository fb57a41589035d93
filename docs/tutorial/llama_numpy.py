"""Read the weights of a Llama-like model and answer a question with NumPy.

python docs/tutorial/llama_numpy.py DIRECTORY "QUESTION"
"""

import json
import sys
from pathlib import Path

import numpy as np


def read_safetensors(path):
    """Return the arrays of a file as float32, by their names."""
    data = Path(path).read_bytes()
    begin = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:begin])
    header.pop("__metadata__", None)
    arrays, types = {}, {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}
    for name, entry in header.items():
        first, last = (begin + offset for offset in entry["data_offsets"])
        array = np.frombuffer(data[first:last], types[entry["dtype"]])
        if entry["dtype"] == "BF16":  # the upper half of a float32
            array = (array.astype("<u4") << 16).view("<f4")
        name = name.removeprefix("model.").removesuffix(".weight")
        arrays[name] = array.reshape(entry["shape"]).astype("f4", copy=False)
    return arrays


def rms_norm(x, weight, epsilon):
    return x / np.sqrt(np.mean(x * x, -1, keepdims=True) + epsilon) * weight


def softmax(scores):
    powers = np.exp(scores - scores.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


def rotate(x, positions, theta):
    """Rotate features i and i + head_dim / 2 of x (heads, length, head_dim)."""
    half = x.shape[-1] // 2
    angle = positions[:, None] / theta ** (np.arange(half) / half)
    cos, sin = (f(angle).astype("f4") for f in (np.cos, np.sin))
    x, y = x[..., :half], x[..., half:]
    return np.concatenate([x * cos - y * sin, x * sin + y * cos], axis=-1)


def forward(weights, config, ids, cache):
    """Return logits (length, vocabulary), and append to the cache of (k, v)."""
    heads, epsilon = config["num_attention_heads"], config["rms_norm_eps"]
    num_cached = cache[0][0].shape[1] if cache else 0
    positions = np.arange(num_cached, num_cached + len(ids))
    x = weights["embed_tokens"][ids]  # (length, d_model)
    for i in range(config["num_hidden_layers"]):
        layer = f"layers.{i}."
        w = {k.split(".")[-1]: a for k, a in weights.items() if layer in k}
        y = rms_norm(x, w["input_layernorm"], epsilon)
        q, k, v = (y @ w[f"{name}_proj"].T for name in "qkv")
        split = (len(ids), -1, q.shape[-1] // heads)
        q, k, v = (a.reshape(split).swapaxes(0, 1) for a in (q, k, v))
        q, k = (rotate(a, positions, config["rope_theta"]) for a in (q, k))
        if num_cached:
            k, v = np.concatenate([cache[i], (k, v)], axis=2)
        cache[i : i + 1] = [(k, v)]
        k, v = (np.repeat(a, heads // len(a), axis=0) for a in (k, v))
        scores = q @ k.swapaxes(1, 2) / q.shape[-1] ** 0.5
        may_see = np.arange(k.shape[1]) <= positions[:, None]
        read = softmax(np.where(may_see, scores, -np.inf)) @ v
        x = x + read.swapaxes(0, 1).reshape(len(ids), -1) @ w["o_proj"].T
        y = rms_norm(x, w["post_attention_layernorm"], epsilon)
        gate, up = y @ w["gate_proj"].T, y @ w["up_proj"].T
        x = x + (gate / (1 + np.exp(-gate)) * up) @ w["down_proj"].T
    x = rms_norm(x, weights["norm"], epsilon)
    return x @ weights.get("lm_head", weights["embed_tokens"]).T


def generate(weights, config, ids, max_new_tokens):
    """Yield the most probable next ids, up to the end of the answer."""
    cache = []
    for _ in range(max_new_tokens):
        token = int(forward(weights, config, ids, cache)[-1].argmax())
        if token == config["eos_token_id"]:
            return
        yield token
        ids = [token]


if __name__ == "__main__":
    from xformer.tokenizers import load_tokenizer

    directory, question = Path(sys.argv[1]), sys.argv[2]
    config = json.loads((directory / "config.json").read_text())
    weights = read_safetensors(directory / "model.safetensors")
    tokenizer = load_tokenizer(directory)
    ids = tokenizer.encode(
        f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    )
    answer = list(generate(weights, config, ids, max_new_tokens=60))
    print(tokenizer.decode(answer))
