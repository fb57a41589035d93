"""Conversion and validation of the token ids that enter a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from xformer import masks
from xformer.backends import Array, array_namespace, dtype_name, is_floating, is_integer
from xformer.backends.arrays import as_array, to_host, to_library_of
from xformer.config import integers
from xformer.errors import DataError, ShapeError
from xformer.tree import is_array, wrong_array


def as_token_ids(data: Any, name: str, vocab_size: int, like: Array) -> Array:
    """Convert token ids to the library and device of a model, and check them.

    Values are checked wherever reading them does not wait for a device: libraries wrap or clamp other ids silently.

    Args:
        data: Integers (batch, length): an array of the model's library, a NumPy array or nested lists. Or floating
            one-hot rows (batch, length, vocab_size), which are cast to the dtype of the model.
        name: Name of the ids in errors, e.g. "source".
        vocab_size: Number of tokens.
        like: A parameter of the model.

    Returns:
        Integers (batch, length), or floating rows (batch, length, vocab_size).

    Raises:
        DataError: For ids outside [0, vocab_size) or ragged rows.
        ShapeError: For other ranks or dtypes, and rows without a token.
        BackendError: For an array of a third library or on another device.
    """
    subject = f"{name} is"
    data = as_array(data, like, subject)
    if is_floating(data.dtype) and tuple(data.shape[2:]) == (vocab_size,) and data.shape[1]:
        return to_library_of(data, like, subject, dtype=like.dtype)
    _check_ids(data, name)
    data = _signed(data)
    array_namespace(data).check_range(data, vocab_size, lambda ids: _check_range(ids, name, vocab_size))
    return to_library_of(data, like, subject)


def as_segment_ids(data: Any, ids: Array, like: Array) -> Array:
    """Convert the index of the document of each token to the library and device of a model, and check them.

    Args:
        data: Integers of the shape of `ids`: an array of the model's library, a NumPy array or nested lists.
        ids: Token ids (batch, length).
        like: A parameter of the model.

    Raises:
        ShapeError: For other shapes or dtypes.
        DataError: If the tokens of a document are not neighbors; checked where reading values is cheap.
        BackendError: For an array of a third library or on another device.
    """
    data = as_array(data, like, "segment_ids are")
    if tuple(data.shape) != tuple(ids.shape) or not is_integer(data.dtype):
        raise wrong_array(data, "segment_ids have", f"integers of the shape of the tokens, {tuple(ids.shape)}")
    data = _signed(data)
    if array_namespace(data).is_host_accessible(data):
        host = to_host(data)
        num_changes, num_others = ((x[:, 1:] != x[:, :-1]).sum() for x in (host, np.sort(host, axis=1)))
        if num_changes != num_others:
            raise DataError("segment_ids return to an earlier document of the row; expected one run of each number")
    return to_library_of(data, like, "segment_ids are")


def segment_positions(same: Array) -> tuple[Array, Array]:
    """Return the position of each token in its document, (batch, length), and the lengths, (batch, length, 1).

    Args:
        same: Mask of `masks.segments`.
    """
    xp = array_namespace(same)
    pairs = xp.astype(same[:, 0, :, :], xp.int8)
    earlier, lengths = (xp.sum(x, axis=-1, dtype=xp.index_dtype) for x in (xp.tril(pairs), pairs))
    return earlier - 1, xp.expand_dims(lengths, axis=-1)


def as_lengths(lengths: Any, batch: int, like: Array) -> Array:
    """Convert lengths to integers (batch,) in the library and on the device of `like`.

    Raises:
        ShapeError: For other shapes or dtypes.
        BackendError: For an array of a third library or on another device.
    """
    array = to_library_of(lengths if is_array(lengths) else list(lengths), like, "lengths are")
    if tuple(array.shape) != (batch,) or not is_integer(array.dtype):
        raise wrong_array(array, "lengths has", f"integers of shape ({batch},)")
    return array


def check_one_each(name: str, values: Any, num_inputs: int) -> None:
    """Raise DataError unless an argument has one value for each input."""
    if not hasattr(values, "__len__") or len(values) != num_inputs:
        received = f"{len(values)} entries" if hasattr(values, "__len__") else f"type {type(values).__name__}"
        raise DataError(f"{name} has {received} for {num_inputs} inputs; expected one each")


def check_tokens(name: str, tokens: Any, vocab_size: int) -> list[int]:
    """Return token ids as a list; raise DataError for ids outside the vocabulary."""
    ids = integers(name, tokens)
    for token in ids:
        if not 0 <= token < vocab_size:
            raise DataError(f"{name} has token id {token}; expected 0 to {vocab_size - 1}")
    return ids


def check_padding_mask(mask: Array, ids: Array, name: str) -> Array:
    """Return a padding mask; raise ShapeError unless it is boolean of shape (batch, 1, 1, length)."""
    expected = (ids.shape[0], 1, 1, ids.shape[1])
    if not is_array(mask) or tuple(mask.shape) != expected or dtype_name(mask.dtype) != "bool":
        received = f"{dtype_name(mask.dtype)} of shape {tuple(mask.shape)}" if is_array(mask) else type(mask).__name__
        raise ShapeError(f"{name} is {received}; expected bool of shape {expected}; see masks.padding(tokens, pad_id)")
    return mask


def padding_mask(ids: Array, pad_id: int | None) -> Array | None:
    """Return the mask (batch, 1, 1, length) of ids that are not pad_id; None if no id is padding."""
    return None if pad_id is None else masks.padding(ids, pad_id)


def positions_of(ids: Array, pad_id: int | None) -> Array | None:
    """Return the position of each token, (batch, length), counted from the first that is not padding.

    None, if no id is padding, stands for 0, 1, ...
    """
    if pad_id is None:
        return None
    xp = array_namespace(ids)
    num_tokens = xp.cumulative_sum(xp.astype(ids != pad_id, ids.dtype), axis=1)
    has_started = xp.astype(num_tokens > 0, ids.dtype)
    return xp.cumulative_sum(has_started, axis=1) - has_started


def ids_of(tokens: Array) -> Array:
    """Return the ids of one-hot rows; ids are returned unchanged."""
    return array_namespace(tokens).argmax(tokens, axis=-1) if is_floating(tokens.dtype) else tokens


def pad(rows: Sequence[Sequence[int]], pad_id: int | None) -> list[list[int]]:
    """Pad rows of ids on the right to the length of the longest.

    Args:
        rows: Ids of each row.
        pad_id: Id to fill with; None fills with 0, an id like any other.
    """
    length, fill = max(map(len, rows), default=0), 0 if pad_id is None else pad_id
    return [[*row, *[fill] * (length - len(row))] for row in rows]


def _check_ids(ids: Array, name: str) -> None:
    if getattr(ids.dtype, "kind", None) == "U":
        raise ShapeError(f"{name} ids are text; expected integers (batch, length), e.g. [tokenizer.encode(text)]")
    if len(ids.shape) != 2:
        raise ShapeError(f"{name} ids have shape {tuple(ids.shape)}; expected (batch, length): a list of lists")
    if ids.shape[1] == 0:
        raise ShapeError(f"{name} ids have shape {tuple(ids.shape)}; expected at least one token per row")
    if not is_integer(ids.dtype):
        raise ShapeError(f"{name} ids have dtype {dtype_name(ids.dtype)}; expected integers")


def _signed(ids: Array) -> Array:
    """Return ids in a dtype that every library can index with."""
    if dtype_name(ids.dtype) in ("int32", "int64"):
        return ids
    xp = array_namespace(ids)
    return xp.astype(ids, xp.index_dtype)


def _check_range(ids: Array, name: str, vocab_size: int) -> None:
    if 0 in ids.shape:
        return
    xp = array_namespace(ids)
    lowest, highest = int(xp.min(ids)), int(xp.max(ids))
    if lowest < 0 or highest >= vocab_size:
        expected = f"0 to {vocab_size - 1} for a vocabulary of {vocab_size} tokens"
        raise DataError(f"{name} ids range from {lowest} to {highest}; expected {expected}")
