"""Train a peer on tiny Shakespeare by the clock: `python bench/speedrun/shakespeare.py SECONDS TEXT --library jax`.

Model, initial values, batches and optimizer are those of docs/recipes/tinyshakespeare-speedrun.toml, whose own entry is
run.py. The clock runs from the start of the process; the learning rate falls with it. Prints a row of the table.
"""

from __future__ import annotations

import argparse
import functools
import math
import time
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
from names import START  # when the process started

RECIPE = Path(__file__).parents[2] / "docs" / "recipes" / "tinyshakespeare-speedrun.toml"
HEADS, LENGTH, BATCH, RATE, WARMUP, DECAY = 4, 128, 8, 0.01, 100, 0.1
BETA1, BETA2, EPSILON, MOMENTUM = 0.9, 0.98, 1e-9, 0.95
NORMS = "self_attention_residual.norm", "feed_forward_residual.norm"
LEFT = {"torch": 3.0, "torch-compile": 4.0, "jax": 4.0}  # seconds kept for the validation of 111,540 characters


def read_text(path: Path) -> tuple[np.ndarray, np.ndarray, int]:
    """Return the ids of the characters, the first 90 % and the rest, and their number."""
    text = path.read_text(encoding="utf-8")
    ids = {character: number for number, character in enumerate(sorted(set(text)))}
    tokens = np.asarray([ids[character] for character in text])
    return tokens[: len(tokens) * 9 // 10], tokens[len(tokens) * 9 // 10 :], len(ids)


def initial(num_characters: int, seed: int) -> tuple[int, dict[str, np.ndarray]]:
    """Return the number of layers and xformer's initial values by name."""
    import xformer as xf

    settings = tomllib.loads(RECIPE.read_text(encoding="utf-8"))["model"]
    model = xf.LanguageModel(xf.LanguageModelConfig(vocab_size=num_characters, pad_id=None, **settings), seed=seed)
    return settings["num_layers"], {name: np.array(value) for name, value in model.named_parameters()}


def angles(dim: int) -> np.ndarray:
    return np.arange(LENGTH)[:, None] * 10000.0 ** -(np.arange(dim // 2) / (dim // 2))


def share_left(options: Any) -> float:
    left = LEFT[options.library]
    return max(0.0, options.seconds - left - (time.time() - START)) / (options.seconds - left)


def learning_rate(step: int, options: Any) -> float:
    return RATE * min(1.0, (step + 1) / WARMUP) * 0.5 * (1.0 + math.cos(math.pi * (1.0 - share_left(options))))


def chunks(tokens: np.ndarray, generator: Any) -> np.ndarray:
    """Return a batch of random chunks, with the character that follows each."""
    return tokens[generator.integers(len(tokens) - LENGTH, size=BATCH)[:, None] + np.arange(LENGTH + 1)]


def validation_chunks(tokens: np.ndarray) -> np.ndarray:
    """Return the text, chunk after chunk, without the shorter last one."""
    starts = np.arange(0, len(tokens) - LENGTH, LENGTH)[: (len(tokens) - 1) // LENGTH // BATCH * BATCH]
    return tokens[starts[:, None] + np.arange(LENGTH + 1)].reshape(-1, BATCH, LENGTH + 1)


def run_torch(options: Any, train: np.ndarray, held_out: np.ndarray, size: int) -> tuple[int, float]:
    import torch
    import torch.nn.functional as F

    layers, arrays = initial(size, options.seed)
    p = {name: torch.tensor(x, requires_grad=True) for name, x in arrays.items()}
    d = p["embedding.weight"].shape[1]
    cos, sin = (torch.tensor(f(angles(d // HEADS)), dtype=torch.float32) for f in (np.cos, np.sin))
    cos, sin = torch.cat((cos, cos), -1), torch.cat((sin, sin), -1)

    def turn(x: Any) -> Any:
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat((-second, first), -1) * sin

    def norm(x: Any, w: Any, name: str) -> Any:
        return F.layer_norm(x, x.shape[-1:], w[f"{name}.weight"], w[f"{name}.bias"], 1e-5)

    def loss_fn(tokens: Any) -> Any:
        x = F.embedding(tokens[:, :-1], p["embedding.weight"]) * d**0.5
        for i in range(layers):
            w = {name.removeprefix(f"layers.{i}."): x for name, x in p.items() if name.startswith(f"layers.{i}.")}
            n = norm(x, w, NORMS[0])
            q, k, v = ((n @ w[f"self_attention.{name}.weight"]).unflatten(-1, (HEADS, -1)).transpose(1, 2)
                       for name in ("query", "key", "value"))  # fmt: skip
            q, k = (turn(norm(y, w, f"self_attention.{name}_norm"))
                    for y, name in ((q, "query"), (k, "key")))  # fmt: skip
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2)
            x = x + y @ w["self_attention.output.weight"]
            n = norm(x, w, NORMS[1])
            x = x + F.relu(n @ w["feed_forward.up.weight"]).square() @ w["feed_forward.down.weight"]
        logits = norm(x, p, "norm") @ p["embedding.weight"].T
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    weights, others = ([x for x in p.values() if (x.ndim == 2) == is_weight] for is_weight in (True, False))
    adam = torch.optim.AdamW(others, betas=(BETA1, BETA2), eps=EPSILON, weight_decay=DECAY, fused=True)
    momenta = [torch.zeros_like(x) for x in weights]

    def muon(rate: Any) -> None:
        with torch.no_grad():
            for weight, momentum in zip(weights, momenta, strict=True):
                momentum.lerp_(weight.grad, 1 - MOMENTUM)
                y = weight.grad.lerp(momentum, MOMENTUM)
                y = y.T if (is_tall := y.shape[0] > y.shape[1]) else y
                y = y / y.norm().clamp(min=1e-7)
                for _ in range(5):
                    gram = y @ y.T
                    y = 3.4445 * y + (-4.775 * gram + 2.0315 * gram @ gram) @ y
                size = 0.2 * max(weight.shape) ** 0.5
                weight.mul_(1 - rate * DECAY).sub_(rate * size * (y.T if is_tall else y))

    loss_of, update = loss_fn, muon
    if options.library == "torch-compile":
        loss_of, update = torch.compile(loss_fn), torch.compile(muon)
    generator, step = np.random.default_rng(options.seed), 0
    while share_left(options) > 0:
        rate = learning_rate(step, options)
        loss_of(torch.tensor(chunks(train, generator))).backward()
        torch.nn.utils.clip_grad_norm_(p.values(), 1.0)
        adam.param_groups[0]["lr"] = rate
        adam.step()
        update(torch.tensor(rate))
        for x in p.values():
            x.grad = None
        step += 1
    with torch.no_grad():
        return step, float(np.mean([float(loss_fn(torch.tensor(rows))) for rows in validation_chunks(held_out)]))


def run_jax(options: Any, train: np.ndarray, held_out: np.ndarray, size: int) -> tuple[int, float]:
    import jax
    import jax.numpy as jnp

    layers, arrays = initial(size, options.seed)
    d = arrays["embedding.weight"].shape[1]
    cos, sin = (jnp.asarray(f(angles(d // HEADS)), jnp.float32)[:, None] for f in (np.cos, np.sin))

    def norm(x: Any, w: Any, name: str) -> Any:
        return jax.nn.standardize(x, epsilon=1e-5) * w[f"{name}.weight"] + w[f"{name}.bias"]

    def turn(x: Any) -> Any:
        first, second = jnp.split(x, 2, -1)
        return jnp.concatenate((first * cos - second * sin, second * cos + first * sin), -1)

    def loss_fn(p: Any, tokens: Any) -> Any:
        x = p["embedding.weight"][tokens[:, :-1]] * d**0.5
        for i in range(layers):
            w = {name.removeprefix(f"layers.{i}."): x for name, x in p.items() if name.startswith(f"layers.{i}.")}
            n = norm(x, w, NORMS[0])
            q, k, v = ((n @ w[f"self_attention.{name}.weight"]).reshape(*n.shape[:2], HEADS, -1)
                       for name in ("query", "key", "value"))  # fmt: skip
            q, k = (turn(norm(y, w, f"self_attention.{name}_norm")) for y, name in ((q, "query"), (k, "key")))
            y = jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape)
            x = x + y @ w["self_attention.output.weight"]
            n = norm(x, w, NORMS[1])
            x = x + jax.nn.relu(n @ w["feed_forward.up.weight"]) ** 2 @ w["feed_forward.down.weight"]
        logits = jax.nn.log_softmax(norm(x, p, "norm") @ p["embedding.weight"].T)
        return -jnp.mean(jnp.take_along_axis(logits, tokens[:, 1:, None], -1))

    def muon(weight: Any, g: Any, momentum: Any, rate: Any) -> Any:
        momentum = MOMENTUM * momentum + (1 - MOMENTUM) * g
        y = MOMENTUM * momentum + (1 - MOMENTUM) * g
        y = y.T if (is_tall := y.shape[0] > y.shape[1]) else y
        y = y / jnp.maximum(jnp.linalg.norm(y), 1e-7)
        for _ in range(5):
            gram = y @ y.T
            y = 3.4445 * y + (-4.775 * gram + 2.0315 * gram @ gram) @ y
        size = 0.2 * max(weight.shape) ** 0.5
        return (1 - rate * DECAY) * weight - rate * size * (y.T if is_tall else y), momentum

    def adamw(weight: Any, g: Any, moments: Any, rate: Any, t: Any) -> Any:
        m, v = BETA1 * moments[0] + (1 - BETA1) * g, BETA2 * moments[1] + (1 - BETA2) * g * g
        change = m / (1 - BETA1**t) / (jnp.sqrt(v / (1 - BETA2**t)) + EPSILON)
        return (1 - rate * DECAY) * weight - rate * change, (m, v)

    @functools.partial(jax.jit, donate_argnums=0)
    def update(state: Any, tokens: Any, rate: Any) -> Any:
        p, moments, t = state
        g = jax.grad(loss_fn)(p, tokens)
        scale = jnp.maximum(jnp.sqrt(sum(jnp.sum(x * x) for x in g.values())), 1.0)
        new = {
            name: muon(p[name], g[name] / scale, moments[name], rate)
            if p[name].ndim == 2
            else adamw(p[name], g[name] / scale, moments[name], rate, t)
            for name in p
        }
        return {name: x for name, (x, _) in new.items()}, {name: m for name, (_, m) in new.items()}, t + 1.0

    p = {name: jnp.asarray(x) for name, x in arrays.items()}
    moments = {
        name: jnp.zeros_like(x) if x.ndim == 2 else (jnp.zeros_like(x), jnp.zeros_like(x)) for name, x in p.items()
    }
    state, generator, step = (p, moments, 1.0), np.random.default_rng(options.seed), 0
    while share_left(options) > 0:
        rows = chunks(train, generator)
        state = jax.block_until_ready(update(state, rows, learning_rate(step, options)))
        step += 1
    evaluate = jax.jit(loss_fn)
    return step, float(np.mean([float(evaluate(state[0], rows)) for rows in validation_chunks(held_out)]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("seconds", type=float)
    parser.add_argument("text", type=Path)
    parser.add_argument("--library", choices=list(LEFT), required=True)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    steps, loss = (run_jax if options.library == "jax" else run_torch)(options, *read_text(options.text))
    print(f"| {options.library} | {options.seed} | {time.time() - START:.0f} s | {steps:,} | {loss:.4f} |")


if __name__ == "__main__":
    main()
