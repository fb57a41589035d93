"""Other libraries with the weights of xformer's models write the same tokens."""

from __future__ import annotations

import importlib

import pytest
from workloads import decoding

SIZES = {"batch": 3, "length": 7, "heads": 2, "head_dim": 8, "layers": 2, "vocabulary": 50}
# Importing transformers runs deprecated code.
pytestmark = pytest.mark.filterwarnings("ignore")


def run(module, function, **changes):
    computation = getattr(importlib.import_module(module), function)({**SIZES, **changes})
    with computation.context():
        return computation.fingerprint(computation.step(0))[0]


def ours(module="workloads.decoding", **changes):
    tokens = run(module, "build", backend="numpy", **changes)
    assert len(tokens) == SIZES["batch"] * decoding.NUM_TOKENS
    assert len(set(tokens)) > 5  # repeated tokens would make the comparison meaningless
    return tokens


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    monkeypatch.setenv("XFORMER_NUM_THREADS", "1")


def test_beam_search_differs_from_greedy_search():
    assert ours(beam=5) != ours(beam=1)


@pytest.mark.parametrize("beam", [1, 5])
def test_ctranslate2_translates_alike(beam):
    pytest.importorskip("ctranslate2")
    tokens = ours(beam=beam)
    assert run("baselines.ctranslate2_decoding", "build", beam=beam, compute_type="float32") == tokens
    # Rounding to int8 depends on the CPU and changes tokens, but not how many there are.
    assert len(run("baselines.ctranslate2_decoding", "build", beam=beam, compute_type="int8")) == len(tokens)


def test_ctranslate2_continues_alike():
    pytest.importorskip("ctranslate2")
    assert run("baselines.ctranslate2_decoding", "build_language_model", compute_type="float32") == ours(
        "workloads.language_model_decoding"
    )


@pytest.mark.parametrize("beam", [1, 5])
def test_hugging_face_translates_alike(beam):
    pytest.importorskip("transformers")
    assert run("baselines.huggingface_decoding", "build", beam=beam) == ours(beam=beam)


def test_hugging_face_continues_alike():
    pytest.importorskip("transformers")
    assert run("baselines.huggingface_decoding", "build_language_model") == ours("workloads.language_model_decoding")
