"""Attention, alone and as the multi-head layer with its projections."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from xformer.benchmarks.computation import Backend, Computation, fingerprint
from xformer.benchmarks.interleaved import Settings, Workload, name_with_dtype
from xformer.layers import Initializer, MultiHeadAttention
from xformer.ops import attention
from xformer.tracing import vjp
from xformer.tracing.jit import jit


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

        computation = with_gradients(backend, settings, apply, (layer, inputs["x"]), inputs["gradient"])
        return replace(computation, fingerprint=layer_fingerprint)
    arguments = inputs["query"], inputs["key"], inputs["value"]
    return with_gradients(backend, settings, lambda *qkv: attention(*qkv, **masking), arguments, inputs["gradient"])


def with_gradients(
    backend: Backend, settings: Settings, forward: Callable[..., Any], arguments: tuple[Any, ...], gradient: Any = None
) -> Computation:
    """Build the computation of a function, by jit if settings["jit"], with its gradients if settings["backward"].

    Args:
        backend: The library.
        settings: Those of the workload.
        forward: The function, which returns an array.
        arguments: Its arguments, all of which are differentiated.
        gradient: Of the output; default that of `output_gradient`.
    """
    compile_function = jit if settings.get("jit") else lambda function: function
    if not settings["backward"]:
        return backend.computation(compile_function(lambda *arguments: (forward(*arguments),)), *arguments)

    def forward_and_backward(gradient: Any, *arguments: Any) -> tuple[Any, ...]:
        outputs, pullback = vjp(forward, *arguments)
        return (outputs, *pullback(gradient))

    if gradient is None:
        gradient = backend.array(output_gradient(tuple(forward(*arguments).shape)))
    return backend.computation(compile_function(forward_and_backward), gradient, *arguments)


def output_gradient(shape: tuple[int, ...]) -> Any:
    """Return the gradient of an output of this shape, as a NumPy array."""
    return np.random.default_rng(1).standard_normal(shape, dtype="float32")


def layer_fingerprint(result: Any) -> list[list[float]]:
    """Return the fingerprint of the output and of the input's gradient; the order of parameters differs by library."""
    return fingerprint((result[0], result[-1]) if len(result) > 1 else result)
