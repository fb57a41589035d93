"""Other libraries, given the weights of our models, write the very same tokens."""

from __future__ import annotations

import importlib

import pytest

from xformer.benchmarks import decoding

SIZES = {"batch": 3, "length": 7, "heads": 2, "head_dim": 8, "layers": 2, "vocabulary": 50}
# Importing transformers runs other people's deprecated code.
pytestmark = pytest.mark.filterwarnings("ignore")


def answer(module, function, **differences):
    work = getattr(importlib.import_module(module), function)({**SIZES, **differences})
    with work.around():
        return work.digest(work.step(0))


def ours(module="xformer.benchmarks.decoding", **differences):
    tokens = answer(module, "work", backend="numpy", **differences)
    assert len(tokens) == SIZES["batch"] * decoding.TOKENS
    assert len(set(tokens)) > 5  # a model that repeats itself would prove nothing
    return tokens


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    monkeypatch.setenv("XFORMER_NUM_THREADS", "1")


def test_a_beam_finds_something_else():
    assert ours(beam=5) != ours(beam=1)


@pytest.mark.parametrize("beam", [1, 5])
def test_ctranslate2_translates_alike(beam):
    pytest.importorskip("ctranslate2")
    tokens = ours(beam=beam)
    assert answer("peers.ctranslate2_decoding", "work", beam=beam, compute_type="float32") == tokens
    # Rounding to int8 depends on the CPU and changes tokens, but not how many there are.
    assert len(answer("peers.ctranslate2_decoding", "work", beam=beam, compute_type="int8")) == len(tokens)


def test_ctranslate2_continues_alike():
    pytest.importorskip("ctranslate2")
    assert answer("peers.ctranslate2_decoding", "continuing", compute_type="float32") == ours(
        "works.language_model_decoding"
    )


@pytest.mark.parametrize("beam", [1, 5])
def test_hugging_face_translates_alike(beam):
    pytest.importorskip("transformers")
    assert answer("peers.huggingface_decoding", "work", beam=beam) == ours(beam=beam)


def test_hugging_face_continues_alike():
    pytest.importorskip("transformers")
    assert answer("peers.huggingface_decoding", "continuing") == ours("works.language_model_decoding")
