"""Learn the words of tiny Shakespeare in SECONDS: `python bench/speedrun/names.py SECONDS [--library torch]`.

The clock runs from the start of the process; the learning rate falls with it. Prints the seconds, the steps and the
loss in nats per letter on 500 words that were kept apart. One thread; every library has the same model and Adam.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import time
from pathlib import Path
from typing import Any

import numpy as np

START = time.time() - (time.clock_gettime(time.CLOCK_BOOTTIME) - int(Path("/proc/self/stat").read_text().split()[21])
                       / os.sysconf("SC_CLK_TCK"))  # fmt: skip
WORDS = Path(__file__).parents[2] / "docs" / "tutorial" / "shakespeare.json"
LETTERS, LENGTH, HEADS, BATCH, RATE, WARMUP = "_ abcdefghijklmnopqrstuvwxyz", 13, 4, 32, 0.01, 50
LEFT = {"xformer": 0.1, "torch": 0.1, "jax": 0.9}  # seconds kept for the validation, which JAX compiles


def read_words() -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens of the words for training and for validation; 0 is padding, 1 the start and the end."""
    words = json.loads(WORDS.read_text(encoding="utf-8")).split()
    np.random.default_rng(0).shuffle(words)
    rows = [[LETTERS.index(letter) for letter in f" {word} "] for word in words]
    tokens = np.asarray([row + [0] * (LENGTH + 1 - len(row)) for row in rows])
    return tokens[:-500], tokens[-500:]


def seconds_left(options: Any) -> float:
    return options.seconds - LEFT[options.library] - (time.time() - START)


def learning_rate(step: int, options: Any) -> float:
    """Return the rate of a step: a warm-up, and a cosine over the time."""
    share = 1.0 - max(0.0, seconds_left(options) / (options.seconds - LEFT[options.library]))
    return RATE * min(1.0, (step + 1) / WARMUP) * 0.5 * (1.0 + math.cos(math.pi * share))


def initial(d: int, layers: int, seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    shapes = {"token": (len(LETTERS), d), "position": (LENGTH, d), "output": (d, len(LETTERS))}
    for i in range(layers):
        shapes |= {f"w{name}{i}": (d, d) for name in "qkvo"} | {f"w1{i}": (d, 4 * d), f"w2{i}": (4 * d, d)}
    parameters = {
        name: (rng.normal(size=shape) * shape[0] ** -0.5).astype(np.float32) for name, shape in shapes.items()
    }
    parameters["token"] *= 0.2
    parameters["position"] *= 0.2
    return parameters | {f"norm{i}": np.ones(d, np.float32) for i in range(2 * layers + 1)}


def run_xformer(options: Any, train: np.ndarray, held_out: np.ndarray, generator: Any) -> tuple[int, float]:
    import xformer as xf

    config = xf.LanguageModelConfig(
        vocab_size=len(LETTERS), d_model=options.d_model, num_heads=HEADS, d_ff=4 * options.d_model,
        num_layers=options.layers, positions="learned", max_positions=LENGTH, norm="rms", activation="relu", pad_id=0,
        attention_bias=False, feed_forward_bias=False, tie_output=False,
    )  # fmt: skip

    def loss_fn(model: Any, tokens: Any, rng: Any) -> Any:
        losses = xf.cross_entropy(model(tokens[:, :-1]), tokens[:, 1:], pad_id=0)
        return xf.array_namespace(losses).sum(losses)

    def batches() -> Any:
        while seconds_left(options) > 0:
            yield train[generator.integers(len(train), size=BATCH)]

    model, history = xf.fit(
        xf.LanguageModel(config, seed=options.seed), loss_fn, batches(), optimizer=xf.Adam(),
        learning_rate=lambda step: learning_rate(step, options), steps=math.inf, jit=True, data_parallel=1,
        num_tokens=lambda tokens: int(np.count_nonzero(tokens[:, 1:])), max_grad_norm=1.0,
    )  # fmt: skip
    return len(history), float(loss_fn(model, held_out, None)) / np.count_nonzero(held_out[:, 1:])


def run_torch(options: Any, train: np.ndarray, held_out: np.ndarray, generator: Any) -> tuple[int, float]:
    import torch
    import torch.nn.functional as F

    torch.set_num_threads(1)
    d = options.d_model
    p = {name: torch.tensor(x, requires_grad=True) for name, x in initial(d, options.layers, options.seed).items()}
    optimizer = torch.optim.Adam(list(p.values()), betas=(0.9, 0.98), eps=1e-9, fused=True)

    def loss_fn(tokens: Any) -> Any:
        x = F.embedding(tokens[:, :-1], p["token"]) * d**0.5 + p["position"]
        for i in range(options.layers):
            n = F.rms_norm(x, (d,), p[f"norm{2 * i}"], 1e-5)
            q, k, v = ((n @ p[f"w{name}{i}"]).unflatten(-1, (HEADS, -1)).transpose(1, 2) for name in "qkv")
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + y.transpose(1, 2).flatten(-2) @ p[f"wo{i}"]
            x = x + F.relu(F.rms_norm(x, (d,), p[f"norm{2 * i + 1}"], 1e-5) @ p[f"w1{i}"]) @ p[f"w2{i}"]
        logits = F.rms_norm(x, (d,), p[f"norm{2 * options.layers}"], 1e-5) @ p["output"]
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), ignore_index=0)

    step = 0
    while seconds_left(options) > 0:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, options)
        optimizer.zero_grad()
        loss_fn(torch.tensor(train[generator.integers(len(train), size=BATCH)])).backward()
        torch.nn.utils.clip_grad_norm_(p.values(), 1.0)
        optimizer.step()
        step += 1
    with torch.no_grad():
        return step, float(loss_fn(torch.tensor(held_out)))


def run_jax(options: Any, train: np.ndarray, held_out: np.ndarray, generator: Any) -> tuple[int, float]:
    import jax
    import jax.numpy as jnp

    d = options.d_model

    def norm(x: Any, weight: Any) -> Any:
        return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-5) * weight

    def loss_fn(p: Any, tokens: Any) -> Any:
        x = p["token"][tokens[:, :-1]] * d**0.5 + p["position"]
        for i in range(options.layers):
            n = norm(x, p[f"norm{2 * i}"])
            q, k, v = ((n @ p[f"w{name}{i}"]).reshape(*n.shape[:2], HEADS, -1) for name in "qkv")
            x = x + jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape) @ p[f"wo{i}"]
            x = x + jax.nn.relu(norm(x, p[f"norm{2 * i + 1}"]) @ p[f"w1{i}"]) @ p[f"w2{i}"]
        logits = jax.nn.log_softmax(norm(x, p[f"norm{2 * options.layers}"]) @ p["output"])
        labels = tokens[:, 1:]
        return -jnp.sum(jnp.take_along_axis(logits, labels[..., None], -1)[..., 0] * (labels > 0)) / jnp.sum(labels > 0)

    @functools.partial(jax.jit, donate_argnums=0)
    def update(state: Any, tokens: Any, rate: Any) -> Any:
        p, m, v, t = state
        g = jax.grad(loss_fn)(p, tokens)
        scale = jnp.maximum(jnp.sqrt(sum(jnp.sum(x * x) for x in jax.tree.leaves(g))), 1.0)
        m = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g / scale, m, g)
        v = jax.tree.map(lambda v, g: 0.98 * v + 0.02 * (g / scale) ** 2, v, g)
        size, correction = rate / (1 - 0.9**t), 1 / (1 - 0.98**t)
        return jax.tree.map(lambda p, m, v: p - size * m / (jnp.sqrt(v * correction) + 1e-9), p, m, v), m, v, t + 1.0

    p = jax.tree.map(jnp.asarray, initial(d, options.layers, options.seed))
    state, step = (p, jax.tree.map(jnp.zeros_like, p), jax.tree.map(jnp.zeros_like, p), 1.0), 0
    while seconds_left(options) > 0:
        tokens = train[generator.integers(len(train), size=BATCH)]
        state = jax.block_until_ready(update(state, tokens, learning_rate(step, options)))
        step += 1
    return step, float(jax.jit(loss_fn)(state[0], held_out))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("seconds", type=float)
    parser.add_argument("--library", choices=["xformer", "torch", "jax"], default="xformer")
    parser.add_argument("--d-model", type=int, default=32)
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    run = {"xformer": run_xformer, "torch": run_torch, "jax": run_jax}[options.library]
    steps, loss = run(options, *read_words(), np.random.default_rng(options.seed))
    print(f"{options.library}, seed {options.seed}: {time.time() - START:.2f} s, {steps:,} steps, loss {loss:.3f}")


if __name__ == "__main__":
    main()
