"""Whole models of torch with our weights compute the same: outputs, and the first losses of a training."""

from __future__ import annotations

import importlib

import numpy as np
import pytest

from xformer.benchmarks import stacks, training

SIZES = {"batch": 3, "length": 5, "heads": 2, "head_dim": 4, "layers": 2, "vocabulary": 17}


def answer(module, function, settings, steps=1):
    work = getattr(importlib.import_module(module), function)(settings)
    with work.around():
        results = [work.digest(work.step(number)) for number in range(steps)]
    return results[-1], work.facts


@pytest.fixture(autouse=True)
def torch():
    return pytest.importorskip("torch")


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
@pytest.mark.parametrize(
    ("module", "function", "peer"),
    [("xformer.benchmarks.stacks", "encoder", "encoder"), ("works.small_model", "work", "forward")],
)
def test_outputs_are_those_of_torch(module, function, peer):
    ours, facts = answer(module, function, {**SIZES, "backend": "numpy"})
    theirs, their_facts = answer("peers.torch_models", peer, SIZES)
    np.testing.assert_allclose(theirs, ours, atol=1e-5)
    assert facts == their_facts


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
@pytest.mark.parametrize("apart", [{}, {"share_embeddings": False, "tie_output": False}])
def test_a_second_train_step_finds_the_same_loss(apart):
    settings = dict(training.case(SIZES).settings)
    settings |= {"model": stacks.config(SIZES, **apart).to_dict(), "max_grad_norm": 0.1}
    ours, facts = answer("xformer.benchmarks.training", "work", {**settings, "backend": "numpy"}, steps=2)
    theirs, their_facts = answer("peers.torch_training", "work", settings, steps=2)
    first, _ = answer("peers.torch_training", "work", settings)
    np.testing.assert_allclose(theirs, ours, atol=1e-5)
    assert theirs != first
    assert facts == their_facts


def test_with_dropout_there_is_nothing_to_compare():
    settings = dict(training.case(SIZES).settings)
    settings["model"] = stacks.config(SIZES, dropout=0.1).to_dict()
    assert answer("xformer.benchmarks.training", "work", {**settings, "backend": "numpy"})[0] == []
