"""The package of tests/typing, which type checkers check, also runs."""

import sys
from pathlib import Path

import numpy as np
import pytest

import xformer as xf


@pytest.fixture(autouse=True)
def package(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent / "typing"))
    yield
    for name in [name for name in sys.modules if name.split(".")[0] == "forecast"]:
        del sys.modules[name]


def test_model_trains_and_has_derivatives(tmp_path):
    from forecast import derivatives, layers, training
    from forecast.model import Forecaster, Window

    values = np.sin(np.arange(24.0)).reshape(2, 6, 2)
    batch, model = Window(values[:, :-1], values[:, 1:]), Forecaster(2)
    trained, losses = training.train(model, [batch], tmp_path)
    assert losses[-1] < losses[0]
    assert [*dict(derivatives.derivatives(trained, batch).named_arrays())] == [*dict(model.named_arrays())]
    assert derivatives.losses(trained, [batch] * 3)[0] < derivatives.losses(model, [batch])[0]
    assert derivatives.arrays(np.arange(3.0)).shape == (3,)
    assert training.one_step(model, batch, xf.SGD()).gate is not model.gate
    assert layers.move(model.gate).activation == "relu"


def test_language_model_generates(tmp_path):
    from forecast import generation

    generation.adapted(generation.language_model(11), tmp_path)
    outputs = generation.continuations(tmp_path / "model.safetensors", [[3, 4], [5]])
    assert [len(tokens) for tokens in outputs] == [4, 4]
