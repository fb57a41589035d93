"""torch's models with the weights of xformer's models compute the same outputs and losses."""

from __future__ import annotations

import importlib

import numpy as np
import pytest
from workloads import stacks, training

SIZES = {"batch": 3, "length": 5, "heads": 2, "head_dim": 4, "layers": 2, "vocabulary": 17}


def run(module, function, settings, steps=1):
    computation = getattr(importlib.import_module(module), function)(settings)
    with computation.context():
        results = [computation.fingerprint(computation.step(index)) for index in range(steps)]
    return results[-1], computation.metadata


@pytest.fixture(autouse=True)
def torch():
    return pytest.importorskip("torch")


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
@pytest.mark.parametrize(
    ("module", "function", "baseline"),
    [
        ("workloads.stacks", "build_encoder", "build_encoder"),
        ("workloads.small_model", "build", "build_model"),
    ],
)
def test_outputs_are_those_of_torch(module, function, baseline):
    ours, metadata = run(module, function, {**SIZES, "backend": "numpy"})
    theirs, their_metadata = run("baselines.torch_models", baseline, SIZES)
    np.testing.assert_allclose(theirs, ours, atol=1e-5)
    assert metadata == their_metadata


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
@pytest.mark.parametrize("apart", [{}, {"share_embeddings": False, "tie_output": False}])
def test_a_second_train_step_finds_the_same_loss(apart):
    settings = dict(training.workload(SIZES).settings)
    settings |= {"model": stacks.config(SIZES, **apart).to_dict(), "max_grad_norm": 0.1}
    ours, metadata = run("workloads.training", "build", {**settings, "backend": "numpy"}, steps=2)
    theirs, their_metadata = run("baselines.torch_training", "build", settings, steps=2)
    first, _ = run("baselines.torch_training", "build", settings)
    np.testing.assert_allclose(theirs, ours, atol=1e-5)
    assert theirs != first
    assert metadata == their_metadata


def test_the_loss_with_dropout_is_not_compared():
    settings = dict(training.workload(SIZES).settings)
    settings["model"] = stacks.config(SIZES, dropout=0.1).to_dict()
    assert run("workloads.training", "build", {**settings, "backend": "numpy"})[0] == []
