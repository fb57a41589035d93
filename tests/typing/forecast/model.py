"""A model of time series, and its loss."""

from __future__ import annotations

from typing import NamedTuple, assert_type

import xformer as xf
from forecast.layers import Gate, Pair, encoder_layer


class Window(NamedTuple):
    """A batch: values (batch, length, features), and the next ones."""

    values: xf.Array
    targets: xf.Array


class Forecaster(xf.Module):
    """Encoder layers between two linear maps."""

    input: xf.Linear
    layers: tuple[xf.EncoderLayer, ...]
    gate: Gate
    output: Pair

    def __init__(self, num_features: int, d_model: int = 8, *, num_layers: int = 2, seed: int = 0) -> None:
        init = xf.Initializer("numpy", seed=seed, dtype="float64")
        self.input = xf.Linear(num_features, d_model, init=init)
        self.layers = tuple(encoder_layer(d_model, init) for _ in range(num_layers))
        self.gate = Gate(d_model, init=init)
        self.output = Pair(
            xf.Linear(d_model, d_model, init=init), xf.Linear(d_model, num_features, init=init), scale=0.5
        )

    def __call__(self, values: xf.Array, *, rng: xf.Rng | None = None) -> xf.Array:
        if values.ndim != 3:
            raise xf.ShapeError(f"values has shape {values.shape}; expected (batch, length, features)")
        x = self.input(values)
        for layer in self.layers:
            x = layer(x, causal=True, rng=rng)
        assert_type(x, xf.Array)
        return self.output(self.gate(x))


def squared_error(model: Forecaster, batch: Window, rng: xf.Rng | None = None) -> xf.Array:
    """Return the mean squared error of a batch."""
    error = model(batch.values, rng=rng) - batch.targets
    return xf.array_namespace(error).mean(error**2)


def error_and_outputs(model: Forecaster, batch: Window) -> tuple[xf.Array, dict[str, xf.Array]]:
    """Return the error, and outputs as auxiliary results."""
    outputs = model(batch.values)
    return xf.array_namespace(outputs).mean((outputs - batch.targets) ** 2), {"outputs": outputs}
