"""Activations and analyses against TransformerLens; `nox -s interpret` computes its results again."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

import xformer as xf
from tests.interpret.cases import CLEAN, CORRUPTED, NAMES, OTHERS, REPEATED, TARGETS
from xformer import interpret

CHECKPOINTS = Path(__file__).parents[1] / "families" / "data"
REFERENCES = Path(os.environ.get("XFORMER_INTERPRET_REFERENCES", Path(__file__).parent / "references"))
PARTS = ("residual", "heads", "feed_forward")
SCORES = ("attention_entropy", "attention_rollout", "previous_token_scores", "duplicate_token_scores")
METRIC = interpret.logit_difference(TARGETS, OTHERS)


def assert_same(actual, expected):
    assert actual.shape == expected.shape
    np.testing.assert_allclose(actual, expected, rtol=0.0, atol=1e-10)


@pytest.fixture(scope="module", params=["gpt2", "llama"])
def case(request):
    model = xf.load_pretrained(CHECKPOINTS / request.param, dtype="float64")
    return model, dict(np.load(REFERENCES / f"{request.param}.npz"))


def test_activations(case):
    model, expected = case
    with xf.record(model, NAMES) as activations:
        assert_same(model(CLEAN), expected["logits"])
    for name in NAMES:
        reference = expected[f"activation {name}"]
        actual = activations[name]
        if name.endswith(("keys", "values")):  # repeated by TransformerLens
            reference = reference[:, :: reference.shape[1] // actual.shape[1]]
        if name.endswith("scores"):  # theirs are masked
            actual = np.where(np.tri(CLEAN.shape[1], dtype=bool), actual, 0.0)
            reference = np.where(np.isfinite(reference), reference, 0.0)
        assert_same(actual, reference)


def test_parts_of_logits(case):
    model, expected = case
    assert_same(interpret.logit_lens(model, CLEAN), expected["logit_lens"])
    parts = interpret.direct_logit_attribution(model, CLEAN, TARGETS, OTHERS)
    assert_same(parts.embeddings, expected["part embeddings"][0])
    assert_same(parts.heads, expected["part heads"])
    assert_same(parts.feed_forward, expected["part feed_forward"])
    total = parts.embeddings + parts.constant + sum(np.sum(x, axis=0) for x in parts[2:4]) + parts.heads.sum((0, 2))
    assert_same(np.mean(total), METRIC(model(CLEAN)))


def test_ablations(case):
    model, expected = case
    for analysis in (interpret.head_ablation, interpret.feed_forward_ablation):
        assert_same(analysis(model, CLEAN, METRIC), expected[analysis.__name__])
        assert_same(analysis(model, CLEAN, METRIC, value="mean"), expected[f"{analysis.__name__}_mean"])


@pytest.mark.parametrize("part", PARTS)
def test_patching(case, part):
    model, expected = case
    for kind in ("activation", "attribution"):
        actual = getattr(interpret, f"{kind}_patching")(model, CORRUPTED, CLEAN, METRIC, part=part)
        assert_same(actual, expected[f"{kind}_{part}"])


def test_attention(case):
    model, expected = case
    for name in (*SCORES, "induction_scores"):
        assert_same(getattr(interpret, name)(model, REPEATED), expected[name])
