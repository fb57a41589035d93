"""Training with callbacks and a loss of its own."""

from __future__ import annotations

from pathlib import Path
from typing import assert_type

import xformer as xf
from forecast.model import Forecaster, Window, squared_error


class KeepLosses:
    """A callback with a state, which is saved with the run."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def __call__(self, event: xf.Event, loop: xf.TrainingLoop, /) -> bool | str | None:
        if isinstance(event, xf.Step):
            assert_type(event.loss, float)
            self.losses.append(event.loss)
        return "the loss is small" if loop.step > 2 and self.losses[-1] < 1e-6 else None

    def state_dict(self) -> dict[str, list[float]]:
        return {"losses": self.losses}

    def load_state_dict(self, state: dict[str, list[float]]) -> None:
        self.losses = state["losses"]


def train(model: Forecaster, batches: list[Window], directory: Path) -> tuple[Forecaster, list[float]]:
    """Return the trained model and its losses."""
    keep = KeepLosses()
    callbacks: list[xf.Callback] = [keep, xf.print_every(10)]
    trained, history = xf.fit(
        model,
        squared_error,
        batches,
        optimizer=xf.AdamW(weight_decay=0.1),
        learning_rate=1e-2,
        steps=3,
        callbacks=callbacks,
        run_dir=directory,
    )
    assert_type(trained, Forecaster)
    assert_type(history, xf.History)
    loaded = xf.load_parameters(model, directory)
    assert_type(loaded, Forecaster)
    return loaded, keep.losses


def one_step(model: Forecaster, batch: Window, optimizer: xf.Optimizer) -> Forecaster:
    """Return the model after one update."""
    result = xf.train_step(
        model,
        optimizer.init(model),
        [batch],
        None,
        loss_fn=squared_error,
        optimizer=optimizer,
        learning_rate=1e-3,
        num_tokens=1,
    )
    assert_type(result.model, Forecaster)
    assert_type(result.loss, xf.Array)
    return result.model
