"""Rows of several documents: the logits, losses and gradients are those of the documents alone."""

from __future__ import annotations

import numpy as np
import pytest

from tests.conftest import library_or_skip
from tests.reference import normal, raises_line, small_language_model, without_jax
from xformer import masks
from xformer.backends import array_namespace, from_host, to_host
from xformer.errors import DataError, ShapeError
from xformer.ops import cross_entropy
from xformer.tracing import value_and_grad
from xformer.tracing.jit import jit
from xformer.training import Documents, PackedBatch, language_model_loss, pack_documents
from xformer.tree import map_arrays

# The positional encodings, with other options that look at positions.
KINDS = {
    "learned": {"positions": "learned", "max_positions": 16, "pad_id": 0},
    "sinusoidal": {"positions": "sinusoidal"},
    "rotary": {"positions": "rotary", "num_key_value_heads": 1},
    "longrope": {
        "positions": "rotary",
        "rope_scaling": {
            "rope_type": "longrope",
            "short_factor": [1.0, 1.5],
            "long_factor": [2.0, 4.0],
            "original_max_position_embeddings": 4,
            "factor": 2.0,
        },
    },
    "alibi": {"positions": "alibi"},
    "relative": {"positions": "relative", "rematerialize": True},
    "none, window": {"positions": "none", "window": 3},
}
RNG = np.random.default_rng(0)
TOKENS = [RNG.integers(0, 13, size).tolist() for size in (6, 3, 2, 6, 3, 9)]
DOCUMENTS = Documents(TOKENS, [RNG.integers(0, 2, len(ids)).tolist() for ids in TOKENS])
SEGMENTS = np.asarray([[1, 1, 1, 2, 2, 0]])
IDS = np.asarray([[5, 4, 7, 2, 11, 3]])


def model_of(kind, xp="numpy"):
    model = map_arrays(lambda x: x + 0.1 * normal(x.size, *x.shape), small_language_model(**KINDS[kind]))
    return model if xp == "numpy" else model.to(xp)


def loss_alone(model, batch):
    """Return the loss of one document without packing."""
    ids, loss_mask = batch
    xp = array_namespace(next(iter(model.named_parameters()))[1])
    everything = from_host(xp.library, np.ones((1, 1, 1, 1), dtype=bool))
    losses = cross_entropy(model([ids[:-1]], mask=everything), [ids[1:]])
    return xp.sum(losses * from_host(xp.library, np.asarray([loss_mask[1:]], dtype=np.float64)))


def differentiate(loss_fn, model, batch):
    loss, gradient = value_and_grad(loss_fn)(model, batch)
    return {"loss": to_host(loss), **{name: to_host(x) for name, x in gradient.named_parameters()}}


@without_jax
@pytest.mark.parametrize("kind", KINDS)
def test_packed_loss_and_gradient_are_the_sums_over_documents(xp, kind):
    model = model_of(kind, xp)
    rows = pack_documents(DOCUMENTS.lengths, 12)
    packed = PackedBatch.make(DOCUMENTS, rows, 12, xp=xp)
    assert len(rows) == 2
    pairs = zip(DOCUMENTS.tokens, DOCUMENTS.loss_masks, strict=True)
    singles = [differentiate(loss_alone, model, pair) for pair in pairs]
    for name, value in differentiate(language_model_loss, model, packed).items():
        expected = sum(single[name] for single in singles)
        np.testing.assert_allclose(value, expected, rtol=0, atol=1e-12 * max(1.0, np.abs(expected).max()), err_msg=name)


def test_jax_compiles_the_loss():
    xp, rows = library_or_skip("jax"), pack_documents(DOCUMENTS.lengths, 12)
    batches = [PackedBatch.make(DOCUMENTS, rows, 12, xp=library) for library in (np, xp)]
    expected = language_model_loss(model_of("learned"), batches[0])
    np.testing.assert_allclose(jit(language_model_loss)(model_of("learned", xp), batches[1]), expected, rtol=1e-12)


def test_a_jitted_function_takes_other_segments():
    model = model_of("learned")
    forward = jit(lambda model, ids, segments: model(ids, segment_ids=segments))
    for segments in (SEGMENTS, SEGMENTS[:, ::-1].copy(), np.zeros_like(SEGMENTS)):
        np.testing.assert_allclose(forward(model, IDS, segments), model(IDS, segment_ids=segments), rtol=0, atol=1e-14)


def test_one_segment_is_no_segment_and_masks_are_combined():
    model = model_of("learned")
    everything = np.ones((1, 1, 1, 1), dtype=bool)
    np.testing.assert_allclose(model(IDS, segment_ids=7 * np.ones_like(IDS)), model(IDS, mask=everything), atol=1e-14)
    mask = np.ones((1, 1, 1, 6), dtype=bool)
    mask[..., 1] = False
    packed = model(IDS, mask=mask, segment_ids=SEGMENTS)
    np.testing.assert_allclose(packed[:, :3], model(IDS[:, :3], mask=mask[..., :3]), rtol=0, atol=1e-14)


@pytest.mark.parametrize(
    ("segments", "error", "message"),
    [
        ([[1, 1, 2, 2, 1, 1]], DataError, "segment_ids return to an earlier document of the row; expected one run of"),
        ([[1, 1, 2]], ShapeError, r"segment_ids have shape \(1, 3\) .*; expected integers of the shape of the tokens"),
        ([1, 1, 1, 2, 2, 2], ShapeError, r"segment_ids have shape \(6,\) and dtype int64; .* tokens, \(1, 6\)"),
        ([[1.0] * 6], ShapeError, "and dtype float64; expected integers"),
        ([[True] * 6], ShapeError, "and dtype bool; expected integers"),
        ([[1], [1, 2]], DataError, "rows differ in length"),
    ],
)
def test_invalid_segments(segments, error, message):
    with raises_line(error, message):
        small_language_model()(IDS, segment_ids=segments)


def test_the_mask_of_segments():
    expected = [[1, 1, 0], [1, 1, 0], [0, 0, 1]]
    np.testing.assert_array_equal(masks.segments(np.asarray([[4, 4, 0]])), np.asarray([[expected]], dtype=bool))
    with raises_line(ShapeError, r"segment_ids have shape \(1,\) and dtype float64; expected integers of"):
        masks.segments(np.ones(1))
