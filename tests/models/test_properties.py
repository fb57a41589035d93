"""Properties of every input: padding is invisible, the future is hidden, a batch is its rows."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.reference import KINDS, model_of_kind, translation_loss
from xformer import value_and_grad
from xformer.tree import flatten

TOLERANCE = {"rtol": 0.0, "atol": 1e-12}
limited = settings(max_examples=10, deadline=None)


@pytest.fixture(scope="module", params=KINDS)
def model(request):
    return model_of_kind(request.param)


def sentences(vocabulary, longest=6):
    """Token ids of one sentence, without padding."""
    return st.lists(st.integers(1, vocabulary - 1), min_size=1, max_size=longest)


def padded(rows, extra=0):
    length = max(map(len, rows)) + extra
    return np.asarray([row + [0] * (length - len(row)) for row in rows])


pairs = st.tuples(sentences(11), sentences(13))


@limited
@given(pair=pairs, source_padding=st.integers(0, 3), target_padding=st.integers(0, 3))
def test_padding_on_the_right_changes_no_logits(model, pair, source_padding, target_padding):
    source, target = pair
    expected = model([source], [target])
    logits = model(padded([source], source_padding), padded([target], target_padding))
    np.testing.assert_allclose(logits[:, : len(target)], expected, **TOLERANCE)


@limited
@given(pair=pairs, source_padding=st.integers(0, 3), target_padding=st.integers(0, 3))
def test_padding_on_the_left_changes_no_logits(model, pair, source_padding, target_padding):
    source, target = pair
    expected = model([source], [target])
    logits = model([[0] * source_padding + source], [[0] * target_padding + target])
    np.testing.assert_allclose(logits[:, target_padding:], expected, **TOLERANCE)


@limited
@given(pair=pairs, padding=st.integers(1, 3))
def test_padding_changes_no_loss_and_no_gradient(model, pair, padding):
    source, target = pair
    labels = [*target[1:], 2]
    exact = value_and_grad(translation_loss)(model, *map(padded, ([source], [target], [labels])))
    longer = (padded([row], padding) for row in (source, target, labels))
    loss, gradients = value_and_grad(translation_loss)(model, *longer)
    np.testing.assert_allclose(loss, exact[0], **TOLERANCE)
    for found, expected in zip(flatten(gradients)[0], flatten(exact[1])[0], strict=True):
        np.testing.assert_allclose(found, expected, **TOLERANCE)


@limited
@given(pair=st.tuples(sentences(11), sentences(13)), data=st.data())
def test_a_token_changes_no_logits_before_it(model, pair, data):
    source, target = pair
    position = data.draw(st.integers(0, len(target) - 1))
    changed = list(target)
    changed[position] = target[position] % 12 + 1
    before, after = model([source], [target]), model([source], [changed])
    # (a changed token, not a changed length: the length of the target may be known from the start)
    np.testing.assert_array_equal(after[:, :position], before[:, :position])
    assert np.abs(after[:, position:] - before[:, position:]).max() > 1e-6


@limited
@given(rows=st.lists(pairs, min_size=2, max_size=4))
def test_a_batch_equals_its_single_rows(model, rows):
    batch = model(*(padded([row[side] for row in rows]) for side in (0, 1)))
    for index, (source, target) in enumerate(rows):
        np.testing.assert_allclose(batch[index, : len(target)], model([source], [target])[0], **TOLERANCE)


@limited
@given(pair=pairs, cuts=st.lists(st.integers(1, 5), max_size=3), padding=st.integers(0, 2))
def test_cached_decoding_equals_the_full_model(model, pair, cuts, padding):
    source, target = pair
    full = model([source], [target])[0]
    bounds = sorted({cut for cut in cuts if cut < len(target)} | {len(target)})
    lengths = [len(target)] if model.config.length_encoding else None
    cache = model.prefill([[0] * padding + source], lengths=lengths)
    start = 0
    for stop in bounds:
        logits = model.decode_step(np.asarray([target[start:stop]]), cache)
        np.testing.assert_allclose(logits[0], full[stop - 1], **TOLERANCE)
        start = stop


@limited
@given(
    sources=st.lists(sentences(11), min_size=2, max_size=3), tokens=st.lists(sentences(13, 1), min_size=6, max_size=6)
)
def test_reordered_hypotheses_of_a_batch_equal_single_ones(model, sources, tokens):
    """Rows are expanded, reordered and dropped with their sentences, and stay what they would be alone."""
    encoded = model.config.length_encoding
    cache = model.prefill(padded(sources), lengths=[9] * len(sources) if encoded else None)
    model.decode_step(np.full((len(sources), 1), 1), cache)
    cache.reorder([0, 0, 1, 1], None if len(sources) == 2 else [0, 1])
    model.decode_step(np.asarray([tokens[0], tokens[1], tokens[2], tokens[3]]), cache)
    cache.reorder([3, 2], [1])
    logits = model.decode_step(np.asarray([tokens[4], tokens[5]]), cache)
    for row, history in enumerate(([1, *tokens[3], *tokens[4]], [1, *tokens[2], *tokens[5]])):
        lengths = [9] if encoded else None
        memory = model.encode([sources[1]])
        alone = model.decode([history], memory, source=[sources[1]], lengths=lengths)
        np.testing.assert_allclose(logits[row], alone[0, -1], **TOLERANCE)


def test_every_source_token_matters(model):
    """The counterpart of the properties above: nothing is hidden that should be seen."""
    source, target = [3, 4, 5, 6], [1, 7, 8]
    expected = model([source], [target])
    for position in range(4):
        changed = list(source)
        changed[position] = 9
        assert np.abs(model([changed], [target]) - expected).max() > 1e-4
