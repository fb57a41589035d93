"""Decoding on CuPy: the choice of tokens (cuda/topk.cu), which the host reads later, and attention of few queries."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

from xformer.kernels.cupy import launch
from xformer.kernels.cupy.attention import layout_of, with_contiguous_rows
from xformer.kernels.cupy.launch import FLOATS, contiguous, dtype_names, empty, why_not
from xformer.ops.decoding import GREEDY, kernel_settings
from xformer.ops.operation import Kernel

# --- The choice of tokens ---


def choose_into(logits: Any, *arrays: Any, settings: tuple[float, ...] = (0.0,) * 4) -> None:
    """Launch the kernel, with the settings if they are not among its arrays."""
    logits, (rows, n), found = contiguous(logits), logits.shape, arrays[-1]
    threads = min(512 if logits.itemsize == 8 else 1024, -(-n // 128) * 32)
    launch.launch("topk.choose", dtype_names(logits, found), rows, threads, logits, *arrays, rows, n, *settings)


def _choose_forward(logits: Any, uniforms: Any, *, save: bool, **settings: Any) -> tuple[Any, Any]:
    found = empty(logits, (len(logits), 2), launch.compute_dtype(logits))
    uniforms, settings = (None, GREEDY) if uniforms is None else (contiguous(uniforms, found.dtype), settings)
    choose_into(logits, None, None, None, uniforms, None, found, settings=kernel_settings(**settings))
    return found, None


def read_later(array: Any) -> Callable[[], Any]:
    """Return a function that copies an array to the host as it is now, and waits for no later work on the stream."""
    event = launch.cuda().get_current_stream().record()

    def read() -> Any:
        stream = _reading_stream(launch.cuda().runtime.getDevice())
        stream.wait_event(event)
        return array.get(stream=stream)

    return read


@functools.cache
def _reading_stream(device: int) -> Any:
    return launch.cuda().Stream(non_blocking=True)


# --- Attention of few queries ---

_MAX_QUERIES = 16  # of all heads that share keys; more are products of matrices


def _attention_why_not(
    query: Any, key: Any, value: Any, *masks: Any, causal: bool = False, save: bool, **options: Any
) -> str | None:
    (_, heads, queries, features), most = query.shape, 32 * launch.elements_per_thread(query)
    if 0 in (*query.shape, *key.shape):
        return "an empty array"
    if heads // key.shape[1] * queries > _MAX_QUERIES:
        return f"{heads // key.shape[1] * queries} queries share keys (the kernel takes up to {_MAX_QUERIES})"
    if value.shape[3] != features or features > most:
        return f"heads of {features} and {value.shape[3]} features (the kernel takes equal numbers up to {most})"
    if (causal and queries > 1) or options.get("window"):
        return "causal with several queries, or a window"
    if len(masks) == 3 and masks[2] is not None:
        return "dropout"
    return why_not(query)


def _attention_forward(*arrays: Any, scale: float, **options: Any) -> tuple[Any, Any]:
    query, key, value, mask, bias, _ = arrays
    arrays = query, with_contiguous_rows(key), with_contiguous_rows(value), mask, bias
    return _attend(*arrays, None, None, None, scale), None


def _cached_why_not(query: Any, key: Any, value: Any, keys: Any, values: Any, *rest: Any, **options: Any) -> str | None:
    if not keys.flags.c_contiguous or not values.flags.c_contiguous:
        return "keys or values are not contiguous"
    return _attention_why_not(query, keys, values, **options)


def _cached_forward(*arrays: Any, scale: float, save: bool) -> tuple[Any, Any]:
    query, key, value, keys, values, starts, mask, bias = arrays
    return _attend(query, keys, values, mask, bias, key, value, starts, scale), None


def _attend(
    query: Any, keys: Any, values: Any, mask: Any, bias: Any, new_keys: Any, new_values: Any, starts: Any, scale: float
) -> Any:
    (rows, heads, queries, features), kv_heads = query.shape, keys.shape[1]
    query, *new = (x if x is None else with_contiguous_rows(x) for x in (query, new_keys, new_values))
    output, num_queries = empty(query, query.shape), heads // kv_heads * queries
    arrays = query, keys, values, mask, bias
    layout, _ = layout_of((*arrays, None), None, *new)
    lanes = max(1, 1 << (-(-features // launch.elements_per_thread(query)) - 1).bit_length())
    per_block, num_new = 1 if num_queries == 1 else 4, 0 if new_keys is None else new_keys.shape[2]
    blocks, template = rows * kv_heads * -(-num_queries // per_block), (*dtype_names(query), str(per_block))
    arguments = layout, *arrays, *new, starts, output, float(scale), num_new, lanes
    launch.launch("attention.attend", template, blocks, 256, *arguments)
    return output


_ATTENTION: dict[str, Any] = {"backend": "cupy", "vjp": None, "dtypes": FLOATS[:3]}
_CACHED: dict[str, Any] = {"forward": _cached_forward, "why_not": _cached_why_not, **_ATTENTION}
KERNELS = [
    # Sums round differently, so that a neighbor may be drawn: of a number at the border of two tokens.
    Kernel("cupy.choose", "choose", "cupy", _choose_forward, None, dtypes=FLOATS, why_not=why_not, tolerance=1e-2),
    Kernel("cupy.few_queries", "attention", forward=_attention_forward, why_not=_attention_why_not, **_ATTENTION),
    # Compared as cupy.few_queries: random positions would be none of the cache.
    Kernel("cupy.cached_attention", "cached_attention", tolerance=math.inf, **_CACHED),
]
