"""Forecast a time series of irregular samples, and say how certain the forecast is."""

from typing import Any, NamedTuple

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np

import xformer as xf

mpl.use("agg")  # draws files
xp = np  # or torch, jax.numpy, cupy: the library of parameters and batches
PAST, FUTURE = 72, 24  # hours that the model reads, and that it forecasts
LENGTH = 120  # samples of a window at most
PERIODS = (6, 8, 12, 24, 56, 84, 168)  # hours, up to a week

# A year of a sensor that reports about once an hour: days, weekends, a level that
# drifts, and noise. A fifth of the samples is lost.
generator = np.random.default_rng(0)
times = np.cumsum(generator.uniform(0.6, 1.4, 365 * 24))
height = np.where(times // 24 % 7 < 5, 1.5, 0.5)
values = height * np.sin(2 * np.pi * (times / 24 - 0.3))
values += np.cumsum(generator.normal(scale=0.03, size=times.shape))
values += generator.normal(scale=0.3, size=times.shape)
arrived = generator.random(times.shape) < 0.8
times, values = times[arrived], values[arrived]


class Batch(NamedTuple):
    x: Any  # (batch, LENGTH): samples; 0 where they are to be forecast, and padding
    times: Any  # (batch, LENGTH): hours
    is_known: Any  # (batch, LENGTH): samples that the model reads
    y: Any  # (batch, LENGTH): samples to forecast
    is_target: Any  # (batch, LENGTH): where they are

    @property
    def num_tokens(self) -> int:
        """Number of samples whose losses the loss function adds up."""
        return int(self.is_target.sum())


def make_batch(starts):
    """Cut a window around each start of a forecast; values are relative to the past."""
    x, t, y = np.zeros((3, len(starts), LENGTH), dtype=np.float32)
    is_known, is_target = np.zeros((2, len(starts), LENGTH), dtype=bool)
    for row, start in enumerate(starts):
        first, now, last = np.searchsorted(times, (start - PAST, start, start + FUTURE))
        past, future = slice(0, now - first), slice(now - first, last - first)
        level = values[first:now].mean()
        t[row, : last - first] = times[first:last]
        x[row, past], is_known[row, past] = values[first:now] - level, True
        y[row, future], is_target[row, future] = values[now:last] - level, True
    return Batch(*map(xp.asarray, (x, t, is_known, y, is_target)))


class Forecaster(xf.Module):
    """An encoder of samples, and of times without a sample, which get a forecast."""

    inputs: xf.Linear
    layers: list[xf.EncoderLayer]
    norm: xf.LayerNorm
    output: xf.Linear

    def __init__(self, d_model: int = 32, dropout: float = 0.1):
        init = xf.Initializer(xp, seed=0)
        self.inputs = xf.Linear(2 + 2 * len(PERIODS), d_model, init=init)
        self.layers = [
            xf.EncoderLayer(
                xf.MultiHeadAttention(d_model, 4, init=init),
                xf.FeedForward(d_model, 4 * d_model, init=init),
                xf.PreNorm(xf.LayerNorm(d_model, init=init), dropout=dropout),
                xf.PreNorm(xf.LayerNorm(d_model, init=init), dropout=dropout),
            )
            for _ in range(2)
        ]
        self.norm = xf.LayerNorm(d_model, init=init)
        self.output = xf.Linear(d_model, 1, init=init)

    def __call__(self, batch, rng=None):  # -> (batch, LENGTH)
        features = [batch.x, xp.astype(batch.is_known, batch.x.dtype)]
        for hours in PERIODS:  # times in the place of positions
            angle = batch.times * (2 * np.pi / hours)
            features += [xp.sin(angle), xp.cos(angle)]
        x = self.inputs(xp.stack(features, axis=-1))  # (batch, LENGTH, d_model)
        mask = batch.is_known[:, None, None, :]  # nobody attends to what is not known
        for i, layer in enumerate(self.layers):
            x = layer(x, mask=mask, rng=None if rng is None else rng.fold_in(i))
        return self.output(self.norm(x))[..., 0]


def squared_error(model, batch, rng):
    """Return the sum over the samples to forecast."""
    forecast = model(batch, rng)
    ns = xf.array_namespace(forecast)  # in a derivative, the forecast is traced
    return ns.sum(ns.where(batch.is_target, forecast - batch.y, 0.0) ** 2)


def days(first, last, count):
    """Draw times between two days."""
    return 24 * generator.uniform(first, last, count)


validation = make_batch(days(275, 310, 100))
model, history = xf.fit(
    Forecaster(),
    squared_error,
    [make_batch(days(4, 270, 32)) for _ in range(200)],
    optimizer=xf.AdamW(),
    learning_rate=xf.schedules.cosine(3e-3, warmup_steps=50),
    steps=600,
    jit=True,
    keep_best=True,
    callbacks=[
        xf.validate([validation], every=50),
        xf.early_stopping(patience=3),
        xf.print_every(100, unit="samples"),
    ],
)

# Two naive forecasts: the last sample, and the sample of the day before.
starts = days(315, 360, 200)
test = make_batch(starts)
where, last, day_before = test.is_target, np.zeros_like(test.y), np.zeros_like(test.y)
for row, known in enumerate(map(np.flatnonzero, test.is_known)):
    last[row] = test.x[row, known[-1]]
    ages = np.abs(test.times[row, :, None] - 24 - test.times[row, known])
    day_before[row] = test.x[row, known[np.argmin(ages, axis=1)]]
forecasts = {"last sample": last, "day before": day_before, "model": model(test)}
for name, forecast in forecasts.items():
    error = np.sqrt(np.mean((forecast - test.y)[where] ** 2))
    print(f"{name:11}  root mean square error {error:.2f}")

# With an rng, dropout stays on: each run is another model (Monte Carlo dropout), and
# their spread is what the model does not know. The noise of samples comes on top.
runs = np.stack([model(test, rng=xf.Rng(seed)) for seed in range(50)])
noise = np.mean((model(validation) - validation.y)[validation.is_target] ** 2)
mean, deviation = runs.mean(axis=0), np.sqrt(runs.var(axis=0) + noise)
is_inside = np.abs(test.y - mean) < 1.64 * deviation
print(f"between the limits of 90 %: {np.mean(is_inside[where]):.0%} of the samples")

row = np.argmin(np.abs(starts / 24 % 7 - 5))  # Friday night
known, future = test.is_known[row], test.is_target[row]
hours = test.times[row] - starts[row]
low, high = (mean[row] + sign * 1.64 * deviation[row] for sign in (-1, 1))
figure, axis = plt.subplots(figsize=(7, 3), layout="constrained")
axis.fill_between(hours[future], low[future], high[future], alpha=0.3)
axis.plot(hours[future], mean[row, future], label="forecast, with 90 %")
axis.plot(hours[future], day_before[row, future], ":", label="day before")
axis.plot(hours[known], test.x[row, known], ".", color="gray", label="known")
axis.plot(hours[future], test.y[row, future], "k.", label="what came")
axis.set(xlabel="hours")
figure.legend(loc="outside upper center", ncols=4)
figure.savefig("forecast.png", dpi=150)
