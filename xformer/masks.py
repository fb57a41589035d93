"""The only constructors of attention masks.

One convention everywhere: boolean, True = may attend, broadcastable to (batch, heads, queries, keys).
"""

from __future__ import annotations

from typing import Any

from xformer.backends import Array, Device, array_namespace, dtype_name, is_integer, resolve
from xformer.errors import ShapeError
from xformer.ops.attention import causal_mask, check_boolean


def padding(tokens: Array, pad_id: int) -> Array:
    """Mask the padding of keys: True where a token is not `pad_id`.

    tokens: (batch, keys) integers. Returns (batch, 1, 1, keys).
    """
    xp = array_namespace(tokens)
    if len(tokens.shape) != 2 or not is_integer(tokens.dtype):
        raise ShapeError(
            f"tokens have shape {tuple(tokens.shape)} and dtype {dtype_name(tokens.dtype)}; "
            "expected integers of shape (batch, length)"
        )
    return xp.expand_dims(xp.expand_dims(tokens != pad_id, axis=1), axis=1)


def causal(queries: int, keys: int | None = None, *, xp: Any, device: Device = None) -> Array:
    """Mask the future: query i may see key j when j <= i + keys - queries (the last query sees the last key).

    Returns (queries, keys); `keys` defaults to `queries`. Attention layers build this themselves with causal=True.
    """
    return causal_mask(resolve(xp), queries, queries if keys is None else keys, device)


def sliding_window(queries: int, keys: int | None = None, *, size: int, xp: Any, device: Device = None) -> Array:
    """Mask what is far away: query i may see the keys less than `size` positions from its own, i + keys - queries.

    With causal=True those are the last `size` keys (Beltagy et al., 2020; Jiang et al., 2023). Returns (queries, keys).
    Raises ShapeError for a size below 1.
    """
    if size < 1:
        raise ShapeError(f"size is {size}; expected a window of at least 1 token")
    xp, keys = resolve(xp), queries if keys is None else keys
    query = xp.reshape(xp.arange(keys - queries, keys, device=device), (queries, 1))
    key = xp.reshape(xp.arange(keys, device=device), (1, keys))
    return xp.abs(query - key) < size


def combine(*masks: Array | None) -> Array | None:
    """Allow what every mask allows; None allows everything. Raises ShapeError for a mask that is not boolean."""
    result = None
    for mask in masks:
        if mask is not None:
            check_boolean(mask)
            result = mask if result is None else array_namespace(result, mask).logical_and(result, mask)
    return result


def from_blocked(blocked: Array) -> Array:
    """Convert the opposite convention, common in tutorials: there 1 or True marks what may NOT be attended to."""
    xp = array_namespace(blocked)
    return xp.logical_not(blocked) if dtype_name(blocked.dtype) == "bool" else blocked == 0
