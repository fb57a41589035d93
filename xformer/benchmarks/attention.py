"""Attention: the core, softmax(QK')V, and the layer around it with its four projections."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from typing import Any

from xformer.autodiff import vjp
from xformer.benchmarks.interleaved import Case, in_dtype
from xformer.benchmarks.workload import Library, Work, digest
from xformer.layers import Initializer, MultiHeadAttention
from xformer.ops import attention


def case(settings: dict[str, Any]) -> Case:
    """The case of one size.

    settings: batch, heads, length, head_dim; causal, padded, backward (with the gradient of every input) and layer
    (the multi-head attention layer of heads * head_dim features, in place of the core); dtype, if it is not float32.
    """
    sizes = "x".join(str(settings[name]) for name in ("batch", "heads", "length", "head_dim"))
    flags = [name for name in ("causal", "padded") if settings[name]]
    what = "multi-head attention" if settings["layer"] else "attention"
    name = " ".join([what, sizes, *flags, "forward + backward" if settings["backward"] else "forward"])
    return Case(in_dtype(name, settings), settings, (settings["batch"] * settings["length"],), flops(settings))


def memory_case(settings: dict[str, Any]) -> Case:
    """The same, for its memory: without a warm-up, since once is enough."""
    return dataclasses.replace(case(settings), warm_up=0)


def flops(settings: dict[str, Any]) -> int:
    """Operations in matrix products; causal attention needs half of the scores, a backward pass two forward passes.

    Padding counts as if it were text, and what a kernel computes twice counts once.
    """
    batch, heads, length, head_dim = (settings[name] for name in ("batch", "heads", "length", "head_dim"))
    pairs = length * (length + 1) // 2 if settings["causal"] else length * length
    count: int = 4 * batch * heads * pairs * head_dim
    if settings["layer"]:
        count += 8 * batch * length * (heads * head_dim) ** 2
    return 3 * count if settings["backward"] else count


def inputs(settings: dict[str, Any]) -> dict[str, Any]:
    """What every contender gets, in NumPy, the same for the same settings.

    query, key, value: (batch, heads, length, head_dim); x: (batch, length, heads * head_dim), for the layer.
    gradient: of the output, in its shape. mask: boolean, True = may attend, (batch, 1, 1, length), or None.
    """
    host: Any = importlib.import_module("numpy")
    rng = host.random.default_rng(0)
    batch, heads, length, head_dim = (settings[name] for name in ("batch", "heads", "length", "head_dim"))
    core, layer = (batch, heads, length, head_dim), (batch, length, heads * head_dim)
    names = ("x", "gradient") if settings["layer"] else ("query", "key", "value", "gradient")
    shape = layer if settings["layer"] else core
    found = {name: rng.standard_normal(shape, dtype="float32") for name in names}
    kept = rng.integers(max(1, length // 2), length + 1, (batch, 1, 1, 1))
    return {**found, "mask": host.arange(length) < kept if settings["padded"] else None}


def work(settings: dict[str, Any]) -> Work:
    """Attention by xformer, on the library that settings["backend"] names."""
    library = Library.of(settings)
    given = {name: library.array(array) for name, array in inputs(settings).items()}
    masked = {"mask": given["mask"], "causal": settings["causal"]}
    if settings["layer"]:
        heads = settings["heads"]
        layer = MultiHeadAttention(
            heads * settings["head_dim"], heads, init=Initializer(library.xp, dtype=library.dtype)
        )
        made = _work(library, settings, lambda layer, x: layer(x, **masked), (layer, given["x"]), given["gradient"])
        return dataclasses.replace(made, digest=ends)
    heads_apart = given["query"], given["key"], given["value"]
    return _work(library, settings, lambda *qkv: attention(*qkv, **masked), heads_apart, given["gradient"])


def _work(
    library: Library, settings: dict[str, Any], forward: Callable[..., Any], arguments: tuple[Any, ...], gradient: Any
) -> Work:
    """The work of a function, or of it and its gradients."""
    if not settings["backward"]:
        return library.work(lambda *arguments: (forward(*arguments),), *arguments)

    def both(gradient: Any, *arguments: Any) -> tuple[Any, ...]:
        out, pull_back = vjp(forward, *arguments)
        return (out, *pull_back(gradient))

    return library.work(both, gradient, *arguments)


def ends(result: Any) -> list[float]:
    """The digest of a layer's output and of the gradient of its input; others store parameters in other orders."""
    return digest((result[0], result[-1]) if len(result) > 1 else result)
