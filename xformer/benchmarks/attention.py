"""Attention, alone and as the multi-head layer with its projections, and the sizes that `xformer bench` measures."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from xformer.benchmarks.computation import Backend, Computation, fingerprint
from xformer.benchmarks.interleaved import Spec, Workload, name_with_dtype
from xformer.layers import Initializer, MultiHeadAttention
from xformer.ops import attention
from xformer.tracing import vjp


def workload(settings: dict[str, Any]) -> Workload:
    """Return the workload of one size.

    Args:
        settings: batch, heads, length, head_dim; causal, padded; backward (include the gradients of all inputs); layer
            (the multi-head layer with heads * head_dim features instead of attention alone); dtype (default float32).
    """
    sizes = "x".join(str(settings[name]) for name in ("batch", "heads", "length", "head_dim"))
    flags = [name for name in ("causal", "padded") if settings[name]]
    function = "multi-head attention" if settings["layer"] else "attention"
    name = " ".join([function, sizes, *flags, "forward + backward" if settings["backward"] else "forward"])
    tokens = settings["batch"] * settings["length"]
    return Workload(name_with_dtype(name, settings), settings, (tokens,), flops(settings))


def flops(settings: dict[str, Any]) -> int:
    """Count the operations of the matrix products.

    Causal attention needs half of the scores, a backward pass costs two forward passes. Padding counts like text, and
    what a kernel recomputes counts once.
    """
    batch, heads, length, head_dim = (settings[name] for name in ("batch", "heads", "length", "head_dim"))
    pairs = length * (length + 1) // 2 if settings["causal"] else length * length
    count: int = 4 * batch * heads * pairs * head_dim
    if settings["layer"]:
        count += 8 * batch * length * (heads * head_dim) ** 2
    return 3 * count if settings["backward"] else count


def make_inputs(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the inputs of all implementations as NumPy arrays, the same for the same settings.

    Returns:
        query, key, value: (batch, heads, length, head_dim), or for the layer x: (batch, length, heads * head_dim);
        gradient: of the output, in its shape; mask: (batch, 1, 1, length), boolean, True = may attend, or None.
    """
    rng = np.random.default_rng(0)
    batch, heads, length, head_dim = (settings[name] for name in ("batch", "heads", "length", "head_dim"))
    names = ("x", "gradient") if settings["layer"] else ("query", "key", "value", "gradient")
    shape = (batch, length, heads * head_dim) if settings["layer"] else (batch, heads, length, head_dim)
    inputs: dict[str, Any] = {name: rng.standard_normal(shape, dtype="float32") for name in names}
    lengths = rng.integers(max(1, length // 2), length + 1, (batch, 1, 1, 1))
    return {**inputs, "mask": np.arange(length) < lengths if settings["padded"] else None}


def build(settings: dict[str, Any]) -> Computation:
    """Build attention by xformer on settings["backend"]."""
    backend = Backend.from_settings(settings)
    inputs = {name: backend.array(array) for name, array in make_inputs(settings).items()}
    masking = {"mask": inputs["mask"], "causal": settings["causal"]}
    if settings["layer"]:
        heads = settings["heads"]
        initializer = Initializer(backend.xp, dtype=backend.dtype)
        layer = MultiHeadAttention(heads * settings["head_dim"], heads, init=initializer)

        def apply(layer: MultiHeadAttention, x: Any) -> Any:
            return layer(x, **masking)

        computation = _build(backend, settings, apply, (layer, inputs["x"]), inputs["gradient"])
        return replace(computation, fingerprint=layer_fingerprint)
    arguments = inputs["query"], inputs["key"], inputs["value"]
    return _build(backend, settings, lambda *qkv: attention(*qkv, **masking), arguments, inputs["gradient"])


def _build(
    backend: Backend, settings: dict[str, Any], forward: Callable[..., Any], arguments: tuple[Any, ...], gradient: Any
) -> Computation:
    """Build the computation of a function, with its gradients if settings["backward"]."""
    if not settings["backward"]:
        return backend.computation(lambda *arguments: (forward(*arguments),), *arguments)

    def forward_and_backward(gradient: Any, *arguments: Any) -> tuple[Any, ...]:
        outputs, pullback = vjp(forward, *arguments)
        return (outputs, *pullback(gradient))

    return backend.computation(forward_and_backward, gradient, *arguments)


def layer_fingerprint(result: Any) -> list[list[float]]:
    """Return the fingerprint of the output and of the input's gradient; the order of parameters differs by library."""
    return fingerprint((result[0], result[-1]) if len(result) > 1 else result)


# --- suites -----------------------------------------------------------------------------------------------------------

AXES = ("batch", "length", "heads", "head_dim")
_DEFAULTS = {"causal": False, "padded": False, "backward": False, "layer": False, "dtype": "float32"}


@dataclass(frozen=True)
class Suite:
    """What `xformer bench` measures: attention over a grid of sizes.

    Args:
        settings: Defaults of the settings of `attention.workload`; sizes are a sequence for each axis of the grid.
        rounds: Default number of rounds.
        warmup_steps: Steps before the first round; to measure memory, no further step is needed.
    """

    settings: dict[str, Any]
    rounds: int = 7
    warmup_steps: int = 3

    def quick(self) -> Suite:
        """Return the suite with one size and at most three rounds."""
        first = {axis: self.settings[axis][:1] for axis in AXES}
        return replace(self, settings=self.settings | first, rounds=min(3, self.rounds))

    def workloads(self, **settings: Any) -> list[Workload]:
        """Return the workload of every combination of sizes, with these settings instead of the defaults."""
        settings = {**_DEFAULTS, **self.settings, **settings}
        points = itertools.product(*(settings.pop(axis) for axis in AXES))
        workloads = (workload({**dict(zip(AXES, point, strict=True)), **settings}) for point in points)
        return [replace(workload, warmup_steps=self.warmup_steps) for workload in workloads]


_HEADS = {"heads": (8,), "head_dim": (64,)}
SUITES = {
    "attention": Suite({"batch": (1, 8, 32), "length": (32, 128, 512), **_HEADS}),
    "memory": Suite(
        {"batch": (1,), "length": (1024, 2048, 4096, 8192, 16384), **_HEADS, "heads": (1,), "backward": True}, 1, 0
    ),
}


def backend_specs(backends: Sequence[str]) -> list[Spec]:
    """Return the implementations by xformer on these backends."""
    return [Spec(f"xformer {name}", f"{__name__}:build", {"backend": name}) for name in backends]
