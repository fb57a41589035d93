"""Fit a module of your own, with a loss of your own, to arrays of your own."""

from typing import Any, NamedTuple

import numpy as np

import xformer as xf

xp = np  # or torch, jax.numpy, cupy: the library of parameters and batches


class MLP(xf.Module):
    """A network with one hidden layer."""

    hidden: xf.Linear
    output: xf.Linear

    def __init__(self, in_features: int, width: int, seed: int = 0):
        init = xf.Initializer(xp, seed=seed)
        self.hidden = xf.Linear(in_features, width, init=init)
        self.output = xf.Linear(width, 1, init=init)

    def __call__(self, x):  # (batch, in_features) -> (batch,)
        return self.output(self.hidden(x, activation="gelu"))[:, 0]


class Batch(NamedTuple):
    x: Any  # (batch, in_features)
    y: Any  # (batch,)

    @property
    def num_tokens(self) -> int:
        """Number of items whose losses the loss function adds up."""
        return len(self.y)

    def split(self, n: int) -> list["Batch"]:
        """Split into shards, which `fit` computes on several threads."""
        return [Batch(self.x[i::n], self.y[i::n]) for i in range(min(n, len(self.y)))]


def squared_error(model, batch, rng):
    """Return the sum over the batch; `fit` divides by the number of items."""
    losses = (model(batch.x) - batch.y) ** 2
    return xf.array_namespace(losses).sum(losses)


def make_batches(seed: int, count: int) -> list[Batch]:
    generator = np.random.default_rng(seed)
    inputs = generator.normal(size=(count, 64, 3)).astype(np.float32)
    labels = np.sin(inputs[..., 0]) + inputs[..., 1] * inputs[..., 2]
    return [
        Batch(xp.asarray(x), xp.asarray(y)) for x, y in zip(inputs, labels, strict=True)
    ]


model, history = xf.fit(
    MLP(in_features=3, width=64),
    squared_error,
    make_batches(seed=0, count=50),
    optimizer=xf.AdamW(weight_decay=0.01),
    learning_rate=xf.schedules.cosine(1e-2, warmup_steps=20, total_steps=300),
    steps=300,
    callbacks=[
        xf.print_every(100, unit="samples"),
        xf.validate(make_batches(seed=1, count=5), every=100),
    ],
)
assert history[-1].loss < 0.2 * history[0].loss
