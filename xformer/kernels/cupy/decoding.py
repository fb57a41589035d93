"""Decoding on CuPy: the choice of tokens, attention of few queries (cuda/decoding.cu), and results read later."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

from xformer.backends import array_namespace
from xformer.kernels.cupy import launch
from xformer.kernels.cupy.launch import FLOATS, contiguous, dtype_names, empty, why_not
from xformer.ops.operation import Kernel


def choose(logits: Any, tokens: Any, counts: Any, mask: Any, found: Any) -> None:
    """Write the most probable token of each row and its log-probability, where the host or the next step reads them.

    Args:
        logits: (rows, vocabulary).
        tokens: Receives the ids, int64 (rows, 1), or None.
        counts: Number of steps of each row, int64 (rows,), which is counted up; None for one step.
        mask: Tokens that are not chosen, booleans (vocabulary,), or None.
        found: Receives ids and log-probabilities, float32 or float64 (slots, rows, 2), whose slots steps take in turn.
    """
    logits, (rows, n) = contiguous(logits), logits.shape
    threads = min(1024, -(-n // 128) * 32)
    arrays = logits, mask, found, tokens, counts
    launch.launch("decoding.choose", dtype_names(logits, found), rows, threads, *arrays, rows, n, len(found))


def _best_forward(logits: Any, *, save: bool) -> tuple[Any, Any]:
    found = empty(logits, (1, len(logits), 2), launch.compute_dtype(logits))
    choose(logits, None, None, None, found)
    return found[0], None


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


def _attention_forward(
    query: Any, key: Any, value: Any, mask: Any, bias: Any, dropout_mask: Any, *, scale: float, **options: Any
) -> tuple[Any, Any]:
    if key.strides != value.strides or key.strides[3] != key.itemsize:
        key, value = contiguous(key), contiguous(value)
    return _attend(query, key, value, None, None, None, mask, bias, scale), None


def _cached_why_not(query: Any, key: Any, value: Any, keys: Any, values: Any, *rest: Any, **options: Any) -> str | None:
    if not keys.flags.c_contiguous or not values.flags.c_contiguous:
        return "keys or values are not contiguous"
    return _attention_why_not(query, keys, values, **options)


def _cached_forward(
    query: Any, key: Any, value: Any, keys: Any, values: Any, *rest: Any, scale: float, save: bool
) -> tuple[Any, Any]:
    starts, mask, bias = rest
    return _attend(query, keys, values, key, value, starts, mask, bias, scale), None


def _attend(
    query: Any, keys: Any, values: Any, new_keys: Any, new_values: Any, starts: Any, mask: Any, bias: Any, scale: float
) -> Any:
    (rows, heads, queries, features), (kv_heads, size) = query.shape, keys.shape[1:3]
    xp = array_namespace(query)
    query, *new = (
        x if x is None or x.strides[3] == x.itemsize else contiguous(x) for x in (query, new_keys, new_values)
    )
    output, num_queries = empty(query, query.shape), heads // kv_heads * queries
    lanes = max(1, 1 << (-(-features // launch.elements_per_thread(query)) - 1).bit_length())
    per_block = 1 if num_queries == 1 else 4
    strides = [*query.strides[:3], *keys.strides[:3]]
    for each in new:
        strides += (0, 0, 0) if each is None else each.strides[:3]
    strides = [stride // query.itemsize for stride in strides]
    for x in (mask, bias):
        full = None if x is None else xp.broadcast_to(x, (rows, heads, queries, size))
        strides += [0] * 4 if full is None else [stride // x.itemsize for stride in full.strides]
    num_new = 0 if new_keys is None else new_keys.shape[2]
    sizes = heads, kv_heads, queries, size, num_new, features, float(scale), lanes
    arrays = query, keys, values, *new, starts, mask, bias, output
    blocks, template = rows * kv_heads * -(-num_queries // per_block), (*dtype_names(query), str(per_block))
    launch.launch("decoding.attend", template, blocks, 256, *arrays, *sizes, *strides)
    return output


_ATTENTION: dict[str, Any] = {"backend": "cupy", "vjp": None, "dtypes": ("float16", "bfloat16", "float32")}
KERNELS = [
    Kernel("cupy.best", "best", "cupy", _best_forward, None, dtypes=FLOATS, why_not=why_not),
    Kernel("cupy.few_queries", "attention", forward=_attention_forward, why_not=_attention_why_not, **_ATTENTION),
    Kernel(  # compared as cupy.few_queries: random positions would be none of the cache
        "cupy.cached_attention",
        "cached_attention",
        forward=_cached_forward,
        why_not=_cached_why_not,
        tolerance=math.inf,
        **_ATTENTION,
    ),
]
