"""Write a Transformer that classifies token ids, and fit it on any library."""

from typing import Any, NamedTuple

import numpy as np

import xformer as xf

xp = np  # or torch, jax.numpy, cupy: the library of the parameters


class SequenceClassifier(xf.Module):
    """An encoder with pre-norm layers, the mean over the tokens, and a linear map."""

    embedding: xf.Embedding
    positions: xf.layers.Sinusoidal
    layers: list[xf.EncoderLayer]
    norm: xf.LayerNorm
    output: xf.Linear

    def __init__(self, vocab_size: int, num_classes: int, d_model: int = 32):
        init = xf.Initializer(
            xp, seed=0
        )  # for all layers, so that xp holds all parameters
        self.embedding = xf.Embedding(vocab_size, d_model, init=init)
        self.positions = xf.layers.Sinusoidal(d_model)
        self.layers = [
            xf.EncoderLayer(
                xf.MultiHeadAttention(d_model, 4, init=init),
                xf.FeedForward(d_model, 4 * d_model, init=init),
                xf.PreNorm(xf.LayerNorm(d_model, init=init), dropout=0.1),
                xf.PreNorm(xf.LayerNorm(d_model, init=init), dropout=0.1),
            )
            for _ in range(2)
        ]
        self.norm = xf.LayerNorm(d_model, init=init)
        self.output = xf.Linear(d_model, num_classes, init=init)

    def __call__(self, ids, rng=None):  # (batch, length) -> (batch, num_classes)
        mask = xf.masks.padding(ids, pad_id=0)
        x = self.positions(self.embedding(ids))
        for i, layer in enumerate(self.layers):
            x = layer(x, mask=mask, rng=None if rng is None else rng.fold_in(i))
        x = self.norm(x)
        # The namespace of x, not of ids: in a derivative, x is traced.
        ns = xf.array_namespace(x)
        weights = ns.astype(ids != 0, x.dtype)[:, :, None]
        return self.output(ns.sum(x * weights, axis=1) / ns.sum(weights, axis=1))


class Batch(NamedTuple):
    ids: Any  # (batch, length), 0 is padding
    labels: Any  # (batch,)

    @property
    def num_tokens(self) -> int:
        """Number of items whose losses the loss function adds up."""
        return len(self.labels)


def loss(model, batch, rng):
    """Return the sum of the losses of the batch."""
    losses = xf.cross_entropy(model(batch.ids, rng), batch.labels)
    return xf.array_namespace(losses).sum(losses)


def make_batches(seed: int, count: int) -> list[Batch]:
    """Make sequences that either contain the token 7 or not."""
    generator = np.random.default_rng(seed)
    batches = []
    for _ in range(count):
        ids = generator.integers(1, 20, (32, 12))
        ids[:, 8:] *= generator.integers(0, 2, (32, 1))  # some are shorter
        labels = np.any(ids == 7, axis=1).astype(np.int64)
        batches.append(Batch(xp.asarray(ids), xp.asarray(labels)))
    return batches


model, history = xf.fit(
    SequenceClassifier(vocab_size=20, num_classes=2),
    loss,
    make_batches(seed=0, count=40),
    optimizer=xf.AdamW(),
    learning_rate=3e-3,
    steps=40,
    callbacks=[xf.print_every(10, unit="sequences")],
)
(test,) = make_batches(seed=1, count=1)
classes = xp.argmax(model(test.ids), axis=1)
print("right:", int((classes == test.labels).sum()), "of", len(test.labels))
assert history[-1].loss < history[0].loss
