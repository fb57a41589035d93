"""xformer on torch and JAX against the same computations written in torch and JAX themselves.

    python bench/torch_jax.py torch --threads 2
    python bench/torch_jax.py jax --threads 2

The implementations take turns in one process, and every number is a median of many short rounds. Outputs are compared
before anything is timed.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from workloads import stacks

from xformer.backends import array_namespace, from_host, resolve, to_host
from xformer.tracing import value_and_grad
from xformer.tree import flatten, map_arrays

SIZES = [(1, 32), (32, 128), (8, 512)]
STACK = {"heads": 8, "head_dim": 64, "layers": 6}


def stack(layers: Any, x: Any) -> Any:
    for layer in layers:
        x = layer(x)
    return x


def our_loss(layers: Any, x: Any, weight: Any) -> Any:
    y = stack(layers, x)
    return array_namespace(y).sum(y * weight)


def compare(ours: Any, theirs: Any) -> None:
    for a, b in zip(flatten(ours)[0], flatten(theirs)[0], strict=True):
        a, b = to_host(a), to_host(b)
        np.testing.assert_allclose(a, b, rtol=0.0, atol=2e-3 * max(1.0, abs(b).max()))


def times(functions: list[Callable[[], Any]], seconds: float) -> list[list[float]]:
    """Return the times of the functions, which take turns."""
    for function in functions:
        function()
    result: list[list[float]] = [[] for _ in functions]
    stop = time.perf_counter() + seconds
    while time.perf_counter() < stop or len(result[0]) < 7:
        for durations, function in zip(result, functions, strict=True):
            start = time.perf_counter()
            function()
            durations.append(time.perf_counter() - start)
    return result


def report(name: str, functions: list[Callable[[], Any]], seconds: float) -> None:
    ours, theirs = times(functions, seconds)
    ratio = statistics.median(b / a for a, b in zip(ours, theirs, strict=True))
    print(
        f"| {name} | {1e3 * statistics.median(ours):.1f} | {1e3 * statistics.median(theirs):.1f} | {ratio:.2f} |",
        flush=True,
    )


def on_torch(seconds: float, threads: int) -> None:
    import torch
    from baselines.torch_models import load_layer
    from torch import nn

    torch.set_num_threads(threads)
    for batch, length in SIZES:
        settings = {**STACK, "batch": batch, "length": length}
        layers = stacks.encoder_layers(settings, "torch")
        layer = nn.TransformerEncoderLayer(512, 8, 2048, dropout=0.0, batch_first=True)
        module = nn.TransformerEncoder(layer, settings["layers"]).eval()
        for theirs, ours in zip(module.layers, stacks.encoder_layers(settings, "numpy"), strict=True):
            load_layer(theirs, ours)
        x = torch.from_numpy(stacks.features(settings))
        weight = torch.cos(torch.arange(x.numel())).reshape(x.shape)
        with torch.inference_mode():
            compare(stack(layers, x), module(x))
            report(f"{batch}x{length} forward", [lambda: stack(layers, x), lambda: module(x)], seconds)  # noqa: B023
        training = module.train()
        parameters = list(training.parameters())

        def our_step(layers: Any = layers, x: Any = x, weight: Any = weight) -> Any:
            return value_and_grad(our_loss)(layers, x, weight)

        def their_step(training: Any = training, parameters: Any = parameters, x: Any = x, weight: Any = weight) -> Any:
            return torch.autograd.grad((training(x) * weight).sum(), parameters)

        by_torch = map_arrays(lambda array: array.clone().requires_grad_(), layers)

        def our_layers_by_torch(layers: Any = by_torch, x: Any = x, weight: Any = weight) -> Any:
            return torch.autograd.grad(our_loss(layers, x, weight), flatten(layers)[0])

        compare(our_step()[1], our_layers_by_torch())
        report(f"{batch}x{length} forward and backward", [our_step, their_step], seconds)
        report(f"{batch}x{length} forward and backward by torch's autograd", [our_layers_by_torch, their_step], seconds)


def on_jax(seconds: float, threads: int) -> None:
    import jax
    import jax.numpy as jnp

    def norm(x: Any, weight: Any, bias: Any) -> Any:
        mean = x.mean(-1, keepdims=True)
        variance = jnp.square(x - mean).mean(-1, keepdims=True)
        return (x - mean) * jax.lax.rsqrt(variance + 1e-5) * weight + bias

    def plain(parameters: Any, x: Any) -> Any:
        for p in parameters:
            q, k, v = (
                (x @ p[f"{name}.weight"] + p[f"{name}.bias"]).reshape(*x.shape[:2], 8, 64)
                for name in ("self_attention.query", "self_attention.key", "self_attention.value")
            )
            weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k) / 8.0)
            heads = jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(x.shape)
            y = heads @ p["self_attention.output.weight"] + p["self_attention.output.bias"]
            x = norm(x + y, p["self_attention_residual.norm.weight"], p["self_attention_residual.norm.bias"])
            y = jax.nn.relu(x @ p["feed_forward.up.weight"] + p["feed_forward.up.bias"])
            y = y @ p["feed_forward.down.weight"] + p["feed_forward.down.bias"]
            x = norm(x + y, p["feed_forward_residual.norm.weight"], p["feed_forward_residual.norm.bias"])
        return x

    for batch, length in SIZES:
        settings = {**STACK, "batch": batch, "length": length}
        layers = stacks.encoder_layers(settings, "jax")
        parameters = [dict(layer.named_parameters()) for layer in layers]
        leaves, rebuild = flatten(layers)
        x = from_host(resolve("jax"), stacks.features(settings))
        weight = jnp.cos(jnp.arange(x.size, dtype=jnp.float32)).reshape(x.shape)

        def wait(function: Any, *arguments: Any) -> Callable[[], Any]:
            return lambda: jax.block_until_ready(function(*arguments))

        ours = jax.jit(lambda leaves, x: stack(rebuild(leaves), x))  # noqa: B023
        theirs = jax.jit(plain)
        compare(ours(leaves, x), theirs(parameters, x))
        report(f"{batch}x{length} forward", [wait(ours, leaves, x), wait(theirs, parameters, x)], seconds)
        steps = [
            wait(
                jax.jit(lambda leaves, x, w: flatten(value_and_grad(our_loss)(rebuild(leaves), x, w))[0]),  # noqa: B023
                leaves,
                x,
                weight,
            ),
            wait(jax.jit(jax.value_and_grad(lambda p, x, w: (plain(p, x) * w).sum())), parameters, x, weight),
        ]
        report(f"{batch}x{length} forward and backward", steps, seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("library", choices=["torch", "jax"])
    parser.add_argument("--seconds", type=float, default=10.0, help="time for each line of the table")
    parser.add_argument("--threads", type=int, default=2, help="threads of torch")
    parser.add_argument("--layers", type=int, default=6, help="layers of the encoder")
    parser.add_argument("--sizes", nargs="*", default=[], metavar="BATCHxLENGTH", help="sizes of the input")
    arguments = parser.parse_args()
    STACK["layers"] = arguments.layers
    SIZES[:] = [tuple(map(int, size.split("x"))) for size in arguments.sizes] or SIZES
    print("| computation | xformer, ms | peer, ms | speed relative to the peer |\n|---|---|---|---|")
    {"torch": on_torch, "jax": on_jax}[arguments.library](arguments.seconds, arguments.threads)


if __name__ == "__main__":
    main()
