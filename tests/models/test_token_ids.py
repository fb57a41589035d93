"""Token ids are checked once, before they could wrap around or clamp."""

from __future__ import annotations

import numpy as np
import pytest

from tests.conftest import assert_close, library_or_skip
from tests.reference import SOURCE, TARGET, for_each, raises_line, small_model, without_jax
from xformer.backends import from_host
from xformer.errors import BackendError, DataError, ShapeError
from xformer.models.token_ids import as_token_ids


@without_jax
@for_each("side", [0, 1])
@for_each("bad", [-1, 13])
@for_each("move", ["list", "numpy", "own"])
def test_ids_out_of_range_are_refused(xp, side, bad, move):
    model = small_model(xp, source_vocab_size=13, num_encoder_layers=0, num_decoder_layers=1)
    inputs = [SOURCE.copy(), TARGET.copy()]
    inputs[side][1, 1] = bad
    inputs = [
        {"list": np.ndarray.tolist, "numpy": np.asarray, "own": lambda x: from_host(xp, x)}[move](x) for x in inputs
    ]
    expected = rf"{('source', 'target')[side]} ids range from .*{bad}.*; expected 0 to 12 for a vocabulary of 13 tokens"
    with raises_line(DataError, expected):
        model(*inputs)


def test_jax_ids_out_of_range_are_refused_too():
    xp = library_or_skip("jax")
    like = xp.zeros((2, 2))
    with raises_line(DataError, "source ids range from 0 to 9; expected 0 to 8"):
        as_token_ids(xp.asarray([[0, 9]]), "source", 9, like)


@for_each(
    "ids, error, message",
    [
        ([[1, 2], [3]], DataError, "rows differ in length; expected a rectangle, pad the shorter rows with pad_id"),
        ([1, 2], ShapeError, r"source ids have shape \(2,\); expected \(batch, length\): a list of lists"),
        ([[[1]]], ShapeError, r"source ids have shape \(1, 1, 1\)"),
        (3, ShapeError, r"source ids have shape \(\)"),
        (None, ShapeError, r"source ids have shape \(\)"),
        ([[]], ShapeError, r"source ids have shape \(1, 0\); expected at least one token per row"),
        (np.zeros((2, 0), dtype=int), ShapeError, r"source ids have shape \(2, 0\)"),
        ([[1.0, 2.0]], ShapeError, "source ids have dtype float64; expected integers"),
        ([[True]], ShapeError, "source ids have dtype bool; expected integers"),
        ([["a"]], ShapeError, "source ids are text; expected integers"),
        ([[2**70]], ShapeError, "source ids have dtype object; expected integers"),
    ],
)
def test_ids_must_be_a_rectangle_of_integers(ids, error, message):
    with raises_line(error, message):
        small_model()(ids, TARGET)


def test_arrays_of_the_library_are_checked_too():
    torch = pytest.importorskip("torch", reason="another library than NumPy")
    model = small_model(torch)
    with raises_line(ShapeError, "source ids have dtype float32; expected integers"):
        model(torch.ones((2, 3)), TARGET)
    with raises_line(ShapeError, r"target ids have shape \(3,\)"):
        model(SOURCE, torch.asarray([1, 2, 3]))


def test_arrays_of_a_third_library_are_refused():
    torch = pytest.importorskip("torch", reason="another library than NumPy")
    with raises_line(BackendError, "source is an array of torch and the model one of numpy; expected an array of"):
        small_model()(torch.asarray(SOURCE), TARGET)


def test_ids_on_another_device_are_refused():
    torch = pytest.importorskip("torch", reason="has a device to test with, 'meta'")
    with raises_line(BackendError, r"arrays on different devices were mixed: cpu, meta; move one over"):
        small_model(torch)(torch.zeros((2, 3), dtype=torch.int64, device="meta"), TARGET)


@without_jax
@for_each("dtype", ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"])
def test_every_integer_dtype_is_accepted(xp, dtype):
    model = small_model(xp, num_encoder_layers=0, num_decoder_layers=1)
    expected = model(SOURCE, TARGET)
    assert_close(model(SOURCE.astype(dtype), TARGET.astype(dtype)), expected)
    narrow = [from_host(xp, array, dtype=dtype) for array in (SOURCE, TARGET)]
    assert_close(model(*narrow), expected)


def test_valid_ids_are_not_copied(xp):
    ids = from_host(xp, SOURCE, dtype=xp.index_dtype)
    assert as_token_ids(ids, "source", 11, small_model(xp, num_encoder_layers=0).source_embedding.weight) is ids
