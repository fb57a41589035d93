"""Time a training step of a tiny language model against the same step by hand: `python bench/tiny.py`.

One layer of 4 heads, 16 sequences of 8 tokens, Adam, one thread. `fit(jit=True)` is compared with a C program
(bench/baselines/tiny_step.c), torch eager and compiled, JAX compiled as a whole, and NumPy with derivatives by hand.
They take turns; a time is the least of the rounds, since other programs can only add to it.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

BATCH, LENGTH, VOCABULARY, HEADS, RATE = 16, 8, 27, 4, 1e-3
BETA1, BETA2, EPSILON = 0.9, 0.98, 1e-9
C_SOURCE = Path(__file__).parent / "baselines" / "tiny_step.c"
BATCHES = [np.random.default_rng(0).integers(0, VOCABULARY, (BATCH, LENGTH + 1)) for _ in range(64)]


def initial(d: int) -> dict[str, Any]:
    """Return the parameters of all implementations but C and xformer."""
    rng = np.random.default_rng(0)
    shapes = {"token": (VOCABULARY, d), "position": (LENGTH, d), "output": (d, VOCABULARY)}
    shapes |= {f"w{name}": (d, d) for name in "qkvo"} | {"w1": (d, 4 * d), "w2": (4 * d, d)}
    parameters = {name: (rng.normal(size=shape) / d**0.5).astype(np.float32) for name, shape in shapes.items()}
    biases = {f"b{name}": np.zeros(4 * d if name == "1" else d, np.float32) for name in "qkvo12"}
    return parameters | biases | {f"norm{i}": np.ones(d, np.float32) for i in (1, 2, 3)}


def run_xformer(d: int, steps: int) -> float:
    import xformer as xf

    config = xf.LanguageModelConfig(
        vocab_size=VOCABULARY, d_model=d, num_heads=HEADS, d_ff=4 * d, num_layers=1, positions="learned",
        max_positions=16, norm="rms", activation="relu",
    )  # fmt: skip

    def loss_fn(model, tokens, rng):
        logits = model(tokens[:, :-1])
        return xf.array_namespace(logits).sum(xf.cross_entropy(logits, tokens[:, 1:]))

    train = functools.partial(
        xf.fit, xf.LanguageModel(config, xp=np), loss_fn, BATCHES, num_tokens=lambda tokens: tokens[:, 1:].size,
        optimizer=xf.Adam(), learning_rate=RATE, jit=True,
    )  # fmt: skip
    return (timed(lambda: train(steps=steps + 100)) - timed(lambda: train(steps=100))) / steps


def run_c(d: int, steps: int) -> float:
    with tempfile.TemporaryDirectory() as folder:
        program = f"{folder}/step"
        compiler = os.environ.get("CC") or shutil.which("cc") or "gcc"
        flags = ["-O3", "-march=native", *os.environ.get("CFLAGS", "").split(), f"-DD={d}"]
        subprocess.run([compiler, *flags, str(C_SOURCE), "-lm", "-o", program], check=True)
        return float(subprocess.run([program, str(steps)], check=True, capture_output=True).stdout.split()[0]) * 1e-6


def run_torch(d: int, steps: int, *, compiled: bool = False) -> float:
    import torch
    import torch.nn.functional as F

    torch.set_num_threads(1)
    p = {name: torch.tensor(value, requires_grad=True) for name, value in initial(d).items()}
    optimizer = torch.optim.Adam(list(p.values()), lr=RATE, betas=(BETA1, BETA2), eps=EPSILON, fused=True)

    def heads(x, name):
        return F.linear(x, p[f"w{name}"].T, p[f"b{name}"]).view(BATCH, LENGTH, HEADS, -1).transpose(1, 2)

    def loss_fn(ids):
        x = F.embedding(ids[:, :-1], p["token"]) * d**0.5 + p["position"]
        n = F.rms_norm(x, (d,), p["norm1"], 1e-5)
        y = F.scaled_dot_product_attention(heads(n, "q"), heads(n, "k"), heads(n, "v"), is_causal=True)
        x = x + F.linear(y.transpose(1, 2).reshape(BATCH, LENGTH, d), p["wo"].T, p["bo"])
        n = F.rms_norm(x, (d,), p["norm2"], 1e-5)
        x = x + F.linear(F.relu(F.linear(n, p["w1"].T, p["b1"])), p["w2"].T, p["b2"])
        logits = F.rms_norm(x, (d,), p["norm3"], 1e-5) @ p["output"]
        return F.cross_entropy(logits.view(-1, VOCABULARY), ids[:, 1:].reshape(-1))

    loss_fn = torch.compile(loss_fn) if compiled else loss_fn
    batches = [torch.tensor(ids) for ids in BATCHES]

    def step(i):
        optimizer.zero_grad()
        loss = loss_fn(batches[i % 64])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(p.values(), 1.0)
        optimizer.step()
        return float(loss)

    return per_step(step, steps)


def run_jax(d: int, steps: int) -> float:
    import jax
    import jax.numpy as jnp

    def loss_fn(p, ids):
        def norm(x, name):
            return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-5) * p[name]

        def heads(x, name):
            return (x @ p[f"w{name}"] + p[f"b{name}"]).reshape(BATCH, LENGTH, HEADS, -1)

        x = p["token"][ids[:, :-1]] * d**0.5 + p["position"]
        n = norm(x, "norm1")
        y = jax.nn.dot_product_attention(heads(n, "q"), heads(n, "k"), heads(n, "v"), is_causal=True)
        x = x + y.reshape(BATCH, LENGTH, d) @ p["wo"] + p["bo"]
        x = x + jax.nn.relu(norm(x, "norm2") @ p["w1"] + p["b1"]) @ p["w2"] + p["b2"]
        logits = jax.nn.log_softmax(norm(x, "norm3") @ p["output"])
        return -jnp.mean(jnp.take_along_axis(logits, ids[:, 1:, None], -1))

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state, ids):
        p, m, v, t = state
        loss, g = jax.value_and_grad(loss_fn)(p, ids)
        norm = jnp.sqrt(sum(jnp.sum(x * x) for x in jax.tree.leaves(g)))
        g = jax.tree.map(lambda x: x / jnp.maximum(norm, 1.0), g)
        m = jax.tree.map(lambda m, g: BETA1 * m + (1 - BETA1) * g, m, g)
        v = jax.tree.map(lambda v, g: BETA2 * v + (1 - BETA2) * g * g, v, g)
        size, correction = RATE / (1 - BETA1**t), 1 / (1 - BETA2**t)
        p = jax.tree.map(lambda p, m, v: p - size * m / (jnp.sqrt(v * correction) + EPSILON), p, m, v)
        return (p, m, v, t + 1.0), loss

    p = jax.tree.map(jnp.asarray, initial(d))
    zeros = functools.partial(jax.tree.map, jnp.zeros_like)
    state = [(p, zeros(p), zeros(p), 1.0)]

    def make(i):
        state[0], loss = step(state[0], BATCHES[i % 64])
        return float(loss)

    return per_step(make, steps)


def run_numpy(d: int, steps: int) -> float:
    p, size = initial(d), d // HEADS
    m, v = ({name: np.zeros_like(x) for name, x in p.items()} for _ in range(2))
    hidden_future = np.triu(np.ones((LENGTH, LENGTH), bool), 1)

    def norm(x, name):
        scale = 1 / np.sqrt(np.mean(x * x, -1, keepdims=True) + np.float32(1e-5))
        return x * scale * p[name], scale

    def norm_vjp(g, x, scale, name, grads):
        grads[name] = np.einsum("bld,bld->d", g, x * scale)
        g = g * p[name]
        return g * scale - x * (np.mean(g * x, -1, keepdims=True) * scale**3)

    def affine_vjp(g, x, name, grads):
        rows = g.reshape(-1, g.shape[-1])
        grads[f"w{name}"], grads[f"b{name}"] = x.reshape(-1, x.shape[-1]).T @ rows, rows.sum(0)
        return g @ p[f"w{name}"].T

    def split(x):
        return x.reshape(BATCH, LENGTH, HEADS, size).transpose(0, 2, 1, 3)

    def join(x):
        return x.transpose(0, 2, 1, 3).reshape(BATCH, LENGTH, d)

    def step(i):
        ids, labels, grads = BATCHES[i % 64][:, :-1], BATCHES[i % 64][:, 1:], {}
        x0 = p["token"][ids] * np.float32(d**0.5) + p["position"]
        n1, s1 = norm(x0, "norm1")
        q, k, u = (split(n1 @ p[f"w{name}"] + p[f"b{name}"]) for name in "qkv")
        scores = np.where(hidden_future, -np.inf, q @ k.swapaxes(-1, -2) * np.float32(size**-0.5))
        a = np.exp(scores - scores.max(-1, keepdims=True))
        a /= a.sum(-1, keepdims=True)
        y = join(a @ u)
        x1 = x0 + y @ p["wo"] + p["bo"]
        n2, s2 = norm(x1, "norm2")
        h = np.maximum(n2 @ p["w1"] + p["b1"], 0)
        x2 = x1 + h @ p["w2"] + p["b2"]
        n3, s3 = norm(x2, "norm3")
        logits = n3 @ p["output"]
        e = np.exp(logits - logits.max(-1, keepdims=True))
        probabilities = e / e.sum(-1, keepdims=True)
        chosen = np.take_along_axis(probabilities, labels[..., None], -1)
        g = probabilities
        np.put_along_axis(g, labels[..., None], chosen - 1, -1)
        g /= BATCH * LENGTH
        grads["output"] = n3.reshape(-1, d).T @ g.reshape(-1, VOCABULARY)
        g = norm_vjp(g @ p["output"].T, x2, s3, "norm3", grads)
        g = g + norm_vjp(affine_vjp(affine_vjp(g, h, "2", grads) * (h > 0), n2, "1", grads), x1, s2, "norm2", grads)
        dy = split(affine_vjp(g, y, "o", grads))
        da = dy @ u.swapaxes(-1, -2)
        ds = a * (da - np.sum(a * da, -1, keepdims=True)) * np.float32(size**-0.5)
        cotangents = {"q": join(ds @ k), "k": join(ds.swapaxes(-1, -2) @ q), "v": join(a.swapaxes(-1, -2) @ dy)}
        g = g + norm_vjp(sum(affine_vjp(c, n1, name, grads) for name, c in cotangents.items()), x0, s1, "norm1", grads)
        grads["position"], grads["token"] = g.sum(0), np.zeros_like(p["token"])
        np.add.at(grads["token"], ids.ravel(), g.reshape(-1, d) * np.float32(d**0.5))
        clip = 1 / max(1.0, sum(float(np.vdot(x, x)) for x in grads.values()) ** 0.5)
        rate, correction = RATE / (1 - BETA1 ** (i + 1)), 1 / (1 - BETA2 ** (i + 1))
        for name, gradient in grads.items():
            gradient *= np.float32(clip)
            m[name] += np.float32(1 - BETA1) * (gradient - m[name])
            v[name] += np.float32(1 - BETA2) * (gradient * gradient - v[name])
            p[name] -= np.float32(rate) * m[name] / (np.sqrt(v[name] * np.float32(correction)) + np.float32(EPSILON))
        return float(-np.log(chosen).mean())

    return per_step(step, steps)


def timed(function: Any) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def per_step(step: Any, steps: int) -> float:
    """Return seconds per step after some to warm up; the loss must fall."""
    first = [step(i) for i in range(64)]
    losses: list[float] = []
    seconds = timed(lambda: losses.extend(step(i) for i in range(64, 64 + steps)))
    if not np.mean(losses[-64:]) < np.mean(first):
        sys.exit(f"the loss does not fall: {np.mean(first)} to {np.mean(losses[-64:])}")
    return seconds / steps


IMPLEMENTATIONS = {
    "xformer, fit(jit=True)": run_xformer,
    "C, -O3 -march=native": run_c,
    "torch eager": run_torch,
    "torch.compile": functools.partial(run_torch, compiled=True),
    "JAX, jit of the step": run_jax,
    "NumPy by hand": run_numpy,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--d-model", type=int, action="append", help="default 16, 32 and 64")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--only", help=argparse.SUPPRESS)  # one implementation, in a process of its own
    options = parser.parse_args()
    sizes = options.d_model or [16, 32, 64]
    if options.only:
        print(json.dumps(IMPLEMENTATIONS[options.only](sizes[0], options.steps)))
        return
    one = dict.fromkeys(("XFORMER_NUM_THREADS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    one["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
    print("| microseconds per step | " + " | ".join(f"d_model {d}" for d in sizes) + " |")
    print("|---|" + "---|" * len(sizes))
    times: dict[tuple[str, int], list[float]] = {}
    for _ in range(options.rounds):
        for d in sizes:
            for name in IMPLEMENTATIONS:
                command = [sys.executable, __file__, "--only", name, "--d-model", str(d), "--steps", str(options.steps)]
                done = subprocess.run(command, env=os.environ | one, capture_output=True, text=True, check=False)
                if done.returncode == 0:
                    times.setdefault((name, d), []).append(float(done.stdout.split()[-1]) * 1e6)
                else:
                    print(name, done.stderr.strip().splitlines()[-1], file=sys.stderr)
    for name in IMPLEMENTATIONS:
        cells = [times.get((name, d)) for d in sizes]
        own = [min(times[("xformer, fit(jit=True)", d)]) for d in sizes]
        texts = [f"{min(x):,.0f} ({min(x) / o:.2f})" if x else "" for x, o in zip(cells, own, strict=True)]
        print(f"| {name} | {' | '.join(texts)} |", flush=True)


if __name__ == "__main__":
    main()
