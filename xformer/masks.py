"""Constructors of attention masks.

Masks are boolean, True where attention is allowed, and broadcastable to (batch, heads, queries, keys).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from numbers import Integral
from typing import Any

from xformer.backends import Array, Device, array_namespace, dtype_name, is_integer, resolve
from xformer.config import check_count
from xformer.errors import BackendError, ConfigError, ShapeError, XformerError, out_of_memory
from xformer.ops.attention import causal_mask, window_mask
from xformer.ops.operation import Signature
from xformer.tree import is_array, wrong_array

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
        ConfigError: If pad_id is not an integer.
    """
    xp = array_namespace(tokens)
    if not isinstance(pad_id, Integral):
        raise ConfigError(f"pad_id is {pad_id!r}; expected an integer")
    _check_ids("tokens", tokens)
    return xp.expand_dims(xp.expand_dims(tokens != pad_id, axis=1), axis=1)


def _check_ids(name: str, ids: Array) -> None:
    if len(ids.shape) != 2 or not is_integer(ids.dtype):
        raise wrong_array(ids, f"{name} have", "integers of shape (batch, length)")


def segments(segment_ids: Array) -> Array:
    """Mask attention between documents of a packed row.

    With causal=True of an attention layer, the mask is block-diagonal and causal.

    Args:
        segment_ids: Integers (batch, length), the index of the document of each token.

    Returns:
        Mask of shape (batch, 1, length, length), True where query and key are of the same document.

    Raises:
        ShapeError: If the indices are not a matrix of integers.
    """
    xp = array_namespace(segment_ids)
    _check_ids("segment_ids", segment_ids)
    batch, length = segment_ids.shape
    return xp.reshape(segment_ids, (batch, 1, length, 1)) == xp.reshape(segment_ids, (batch, 1, 1, length))


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
    keys = queries if keys is None else keys
    with _placed(device, queries, keys):
        return causal_mask(resolve(xp), queries, keys, device)


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
        start: Position of the first query, an integer, an array of one, or one for each row, (rows, 1, 1, 1); default
            keys - queries.
        xp: Array library, as a module or by name.
        device: Device of the mask.

    Returns:
        Mask of shape (queries, keys), or (rows, 1, queries, keys).

    Raises:
        ConfigError: If the size is below 1, or another number is no integer.
    """
    check_count("size", size)
    keys = queries if keys is None else keys
    with _placed(device, queries, keys):
        first: Any = keys - queries if start is None else start
        is_position = is_array(first) and is_integer(first.dtype)
        is_position = is_position and (tuple(first.shape) in ((), (1,)) or tuple(first.shape[1:]) == (1, 1, 1))
        if not isinstance(first, Integral) and not is_position:
            raise ConfigError(f"start is {start!r}; expected an integer, or an array of one integer")
        return window_mask(resolve(xp), first, queries, keys, size, device)


@contextlib.contextmanager
def _placed(device: Device, queries: int, keys: int) -> Iterator[None]:
    """Raise errors for sizes that are no counts, for a device that does not exist, and for a mask that is too large."""
    for name, value in (("queries", queries), ("keys", keys)):
        check_count(name, value, at_least=0)
    try:
        with out_of_memory(f"a mask of {queries} queries and {keys} keys", "pass causal=True or window to the layer"):
            yield
    except (AssertionError, RuntimeError, ValueError, TypeError) as error:  # torch without CUDA asserts
        if device is None or isinstance(error, XformerError):
            raise
        raise BackendError(f"a mask cannot be made on device {device!r}: {error}") from error


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
        xp = array_namespace(result, mask)  # raises for masks of several libraries
        try:
            result = mask if result is None else xp.logical_and(result, mask)
        except (ValueError, TypeError, RuntimeError) as error:  # each library has its own class
            shapes = f"{tuple(result.shape)} and {tuple(mask.shape)}"
            raise ShapeError(f"masks.combine got masks of shapes {shapes}; expected shapes that broadcast") from error
    return result


def from_blocked(blocked: Array) -> Array:
    """Convert a mask of the opposite convention, in which True or 1 marks positions that may not be attended to."""
    xp = array_namespace(blocked)
    return xp.logical_not(blocked) if dtype_name(blocked.dtype) == "bool" else blocked == 0
