"""Token ids on their way into a model: checked once, on the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from xformer.backends import (
    Array,
    array_namespace,
    backend_name,
    base_namespace,
    device,
    dtype_name,
    from_host,
    index_dtype,
    is_floating,
    is_host_accessible,
    is_integer,
    same_device,
)
from xformer.errors import BackendError, DataError, ShapeError
from xformer.tree import is_array


def as_token_ids(data: Any, name: str, vocab_size: int, like: Array) -> Array:
    """Return ids as an integer array (batch, length) in the library and on the device of `like`.

    data: an array of that library, a NumPy array, or nested lists of whole numbers. Values are checked wherever
    reading them costs no wait: ids outside [0, vocab_size) would otherwise wrap or clamp silently. Floating one-hot
    rows, (batch, length, vocab_size), are returned as they are, in that library.

    Raises DataError for ids out of range or ragged rows, ShapeError for other ranks or dtypes and for rows without
    a token, BackendError for an array of a third library or on another device.
    """
    home = base_namespace(array_namespace(like))
    if is_array(data) and is_floating(data.dtype) and tuple(data.shape[2:]) == (vocab_size,):
        return _one_hot(data, name, like)
    if is_array(data) and backend_name(array_namespace(data)) == backend_name(home):
        ids = data
        _check_kind(ids, name)
        same_device((like, ids))
        ids = _signed(ids)
        if is_host_accessible(ids):
            _check_range(ids, name, vocab_size)
        return ids
    if is_array(data) and backend_name(array_namespace(data)) != "numpy":
        raise BackendError(
            f"{name} is an array of {backend_name(array_namespace(data))}, the model lives in {backend_name(home)}; "
            "pass that library's array, a NumPy array or nested lists"
        )
    host = from_host(np, data)
    _check_kind(host, name)
    _check_range(host, name, vocab_size)
    return from_host(home, _signed(host), device=device(like))


def _one_hot(rows: Array, name: str, like: Array) -> Array:
    """One-hot rows in the library, dtype and place of `like`; they may be traced, to be differentiated."""
    xp = array_namespace(rows)
    if backend_name(xp) == backend_name(array_namespace(like)):
        same_device((like, rows))
        return xp.astype(rows, like.dtype, copy=False)
    if backend_name(xp) != "numpy":
        raise BackendError(
            f"{name} is an array of {backend_name(xp)}, the model lives in {backend_name(array_namespace(like))}"
        )
    return from_host(base_namespace(array_namespace(like)), rows, dtype=like.dtype, device=device(like))


def as_lengths(lengths: Any, sentences: int, like: Array) -> Array:
    """Whole numbers, one a sentence, in the library and on the device of `like`; raises ShapeError for others."""
    home = base_namespace(array_namespace(like))
    found = from_host(home, lengths if is_array(lengths) else list(lengths), device=device(like))
    if tuple(found.shape) != (sentences,) or not is_integer(found.dtype):
        raise ShapeError(f"lengths have shape {tuple(found.shape)}; expected {sentences} whole numbers")
    return found


def check_rows(source: Array, target: Array) -> None:
    """Raise ShapeError unless source and target have as many rows: one would be broadcast to the other silently."""
    if source.shape[0] != target.shape[0]:
        raise ShapeError(f"source has {source.shape[0]} rows and target {target.shape[0]}; expected as many")


def positions_of(ids: Array, pad_id: int) -> Array:
    """Where each token stands in its row, from 0 at the first that is not padding: (batch, length)."""
    xp = array_namespace(ids)
    started = xp.cumulative_sum(xp.astype(ids != pad_id, ids.dtype), axis=1) > 0
    padding = xp.sum(xp.astype(xp.logical_not(started), ids.dtype), axis=1, keepdims=True)
    return xp.clip(xp.arange(ids.shape[1], dtype=ids.dtype, device=device(ids)) - padding, min=0)


def ids_of(tokens: Array) -> Array:
    """The ids that one-hot rows stand for; ids are returned as they are."""
    return array_namespace(tokens).argmax(tokens, axis=-1) if is_floating(tokens.dtype) else tokens


def pad(rows: Sequence[Sequence[int]], pad_id: int) -> list[list[int]]:
    """Fill rows of ids up to the longest with pad_id, on the right."""
    longest = max(map(len, rows), default=0)
    return [[*row, *[pad_id] * (longest - len(row))] for row in rows]


def _check_kind(ids: Array, name: str) -> None:
    if len(ids.shape) != 2:
        raise ShapeError(f"{name} ids have shape {tuple(ids.shape)}; expected (batch, length): a list of lists")
    if ids.shape[1] == 0:
        raise ShapeError(f"{name} ids have shape {tuple(ids.shape)}; expected at least one token in a row")
    if not is_integer(ids.dtype):
        raise ShapeError(f"{name} ids have dtype {dtype_name(ids.dtype)}; expected integers")


def _signed(ids: Array) -> Array:
    """Ids in a dtype that every library can index with."""
    if dtype_name(ids.dtype) in ("int32", "int64"):
        return ids
    xp = array_namespace(ids)
    return xp.astype(ids, index_dtype(xp))


def _check_range(ids: Array, name: str, vocab_size: int) -> None:
    if 0 in ids.shape:
        return
    xp = array_namespace(ids)
    lowest, highest = int(xp.min(ids)), int(xp.max(ids))
    if lowest < 0 or highest >= vocab_size:
        raise DataError(
            f"{name} ids range from {lowest} to {highest}; expected 0 to {vocab_size - 1} "
            f"for a vocabulary of {vocab_size} tokens"
        )
