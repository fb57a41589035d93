"""Padding is masked where ids show it, and where a mask is passed; ids with two meanings are never hidden."""

from __future__ import annotations

import numpy as np
import pytest

from tests.conftest import assert_close
from tests.reference import raises_line, small_language_model, small_model
from xformer import masks
from xformer.errors import ShapeError

SOURCE, TARGET = np.asarray([[4, 5, 2, 0], [6, 7, 8, 2]]), np.asarray([[1, 5, 6], [1, 7, 0]])
POSITIONS = ("sinusoidal", "rotary")


@pytest.mark.parametrize("pad_id", [None, 2])
def test_an_explicit_mask_hides_padding_of_the_source(pad_id):
    expected = small_model()(SOURCE, TARGET)
    model, mask = small_model(pad_id=pad_id), masks.padding(SOURCE, 0)
    assert_close(model(SOURCE, TARGET, source_mask=mask)[:, :2], expected[:, :2])
    memory = model.encode(SOURCE, source_mask=mask)
    assert_close(model.decode(TARGET, memory, source=SOURCE, source_mask=mask)[:, :2], expected[:, :2])
    cache = model.prefill(SOURCE, source_mask=mask)
    assert_close(model.decode_step(TARGET[:, :2], cache), expected[:, 1])
    weights = model.cross_attention_weights(SOURCE, TARGET, source_mask=mask)[-1]
    assert not weights[0, :, :, 3].any()


def test_without_a_padding_id_every_token_counts():
    assert_close(small_model(pad_id=None)(SOURCE[1:], TARGET[:1]), small_model()(SOURCE[1:], TARGET[:1]))
    memory = small_model(pad_id=None).encode(SOURCE)
    assert np.abs(memory[0, :3] - small_model().encode(SOURCE)[0, :3]).max() > 1e-3


@pytest.mark.parametrize("positions", POSITIONS)
def test_a_start_token_that_is_also_padding_is_not_hidden(positions):
    """T5 and Marian start outputs with pad_id."""
    model, reference = (small_model(positions=positions, pad_id=pad_id, bos_id=0) for pad_id in (0, None))
    target = np.asarray([[0, 5, 6, 0, 7]])
    assert_close(model(SOURCE[1:], target), reference(SOURCE[1:], target))
    assert_close(model.encode(SOURCE), small_model(positions=positions).encode(SOURCE))  # in sources it is padding only


@pytest.mark.parametrize("positions", POSITIONS)
def test_an_end_token_that_is_also_padding_is_not_hidden(positions):
    """GPT-2 has no padding; its files are used with pad_id = eos_id = bos_id."""
    settings = {"positions": positions, "bos_id": 2, "eos_id": 2}
    model = small_language_model(**settings, pad_id=2)
    tokens = np.asarray([[2, 5, 6, 2, 7, 8], [2, 4, 2, 2, 2, 2]])
    expected = small_language_model(**settings, pad_id=None)(tokens)
    assert_close(model(tokens), expected)
    assert_close(model(tokens[1:, :3]), expected[1:, :3])  # padding on the right changes no token before it
    cache = model.init_cache(2)
    assert_close(model.decode_step(tokens, cache), expected[:, -1])


def test_source_masks_of_other_shapes_and_dtypes_are_refused():
    message = r"source_mask is bool of shape \(2, 4\); expected bool of shape \(2, 1, 1, 4\); see masks"
    with raises_line(ShapeError, message):
        small_model()(SOURCE, TARGET, source_mask=SOURCE != 0)
    with raises_line(ShapeError, r"source_mask is int64 of shape \(2, 1, 1, 4\); expected bool"):
        small_model().prefill(SOURCE, source_mask=SOURCE[:, None, None, :])


def test_suppressed_ids_never_contain_the_end():
    assert small_model().config.suppressed_ids == {0, 1}
    assert small_model(pad_id=None).config.suppressed_ids == {1}
    assert small_language_model(pad_id=2, bos_id=2).config.suppressed_ids == set()
