"""Constructors of attention masks.

Masks are boolean, True where attention is allowed, and broadcastable to (batch, heads, queries, keys).
"""

from __future__ import annotations

from typing import Any

from xformer.backends import Array, Device, array_namespace, dtype_name, is_integer, resolve
from xformer.errors import ShapeError
from xformer.ops.attention.definition import causal_mask
from xformer.ops.operation import Signature

_MASK = Signature("mask: (...) bool", {})


def padding(tokens: Array, pad_id: int) -> Array:
    """Mask padded keys.

    Args:
        tokens: Integer token ids, shape (batch, keys).
        pad_id: Id of the padding token.

    Returns:
        Mask of shape (batch, 1, 1, keys), True where a token is not `pad_id`.

    Raises:
        ShapeError: If the tokens are not a matrix of integers.
    """
    xp = array_namespace(tokens)
    if len(tokens.shape) != 2 or not is_integer(tokens.dtype):
        raise ShapeError(
            f"tokens have shape {tuple(tokens.shape)} and dtype {dtype_name(tokens.dtype)}; "
            "expected integers of shape (batch, length)"
        )
    return xp.expand_dims(xp.expand_dims(tokens != pad_id, axis=1), axis=1)


def causal(queries: int, keys: int | None = None, *, xp: Any = "numpy", device: Device = None) -> Array:
    """Mask future keys: query i attends to key j if j <= i + keys - queries, so the last query attends to all.

    Attention layers build this mask themselves with causal=True.

    Args:
        queries: Number of queries.
        keys: Number of keys; default `queries`.
        xp: Array library, as a module or by name.
        device: Device of the mask.

    Returns:
        Mask of shape (queries, keys).
    """
    return causal_mask(resolve(xp), queries, queries if keys is None else keys, device)


def sliding_window(
    queries: int,
    keys: int | None = None,
    *,
    size: int,
    start: int | Array | None = None,
    xp: Any = "numpy",
    device: Device = None,
) -> Array:
    """Mask distant keys: query i attends to keys less than `size` positions from its own, start + i.

    With causal=True those are the last `size` keys (Beltagy et al., 2020; Jiang et al., 2023).

    Args:
        queries: Number of queries.
        keys: Number of keys; default `queries`.
        size: Size of the window, at least 1.
        start: Position of the first query, an integer or an array of shape (1,); default keys - queries.
        xp: Array library, as a module or by name.
        device: Device of the mask.

    Returns:
        Mask of shape (queries, keys).

    Raises:
        ShapeError: If the size is below 1.
    """
    if size < 1:
        raise ShapeError(f"size is {size}; expected a window of at least 1 token")
    xp, keys = resolve(xp), queries if keys is None else keys
    query = xp.reshape(xp.arange(queries, device=device), (queries, 1)) + (keys - queries if start is None else start)
    key = xp.reshape(xp.arange(keys, device=device), (1, keys))
    return xp.abs(query - key) < size


def combine(*masks: Array | None) -> Array | None:
    """Combine masks by logical and.

    Args:
        *masks: Masks that broadcast to each other; None allows everything.

    Returns:
        The combined mask, or None if all masks are None.

    Raises:
        ShapeError: If a mask is not boolean, or their shapes do not broadcast.
    """
    result: Any = None
    for mask in masks:
        if mask is None:
            continue
        _MASK.check("masks.combine", (mask,))
        try:
            result = mask if result is None else array_namespace(result, mask).logical_and(result, mask)
        except (ValueError, TypeError, RuntimeError) as error:  # each library has its own class
            shapes = f"{tuple(result.shape)} and {tuple(mask.shape)}"
            raise ShapeError(f"masks.combine got masks of shapes {shapes}; expected shapes that broadcast") from error
    return result


def from_blocked(blocked: Array) -> Array:
    """Convert a mask of the opposite convention, in which True or 1 marks positions that may not be attended to."""
    xp = array_namespace(blocked)
    return xp.logical_not(blocked) if dtype_name(blocked.dtype) == "bool" else blocked == 0
