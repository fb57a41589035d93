"""Log a training run to TensorBoard, and show the result in a notebook."""

import tempfile
from pathlib import Path

import numpy as np

import xformer as xf

config = xf.LanguageModelConfig(
    vocab_size=8, d_model=16, num_heads=2, d_ff=32, num_layers=2, dropout=0.0
)
counting = np.tile(np.arange(3, 8), (4, 3))  # 3 4 5 6 7 3 4 ...
directory = Path(tempfile.mkdtemp()) / "logs"


def loss_fn(model, tokens, rng):
    logits = model(tokens[:, :-1], rng=rng)
    losses = xf.cross_entropy(logits, tokens[:, 1:])
    return xf.array_namespace(losses).sum(losses)


def samples(model):
    """Return a table: one mapping of column names to texts per row."""
    (outputs,) = xf.generate(model, [[3, 4, 5]], max_new_tokens=5)
    return [
        {
            "prompt": "3 4 5",
            "output": " ".join(map(str, outputs[0].tokens)),
            "reference": "6 7 3 4 5",
        }
    ]


def figures(model):
    """Return matplotlib figures by name."""
    return {"attention": xf.show_attention(model, counting[0, :8]).plot()}


# Or xf.mlflow(...), xf.wandb(...).
logger = xf.tensorboard(directory, samples=samples, figures=figures)
model, history = xf.fit(
    xf.LanguageModel(config, seed=0),
    loss_fn,
    [counting],
    num_tokens=lambda tokens: tokens[:, 1:].size,
    optimizer=xf.Adam(),
    learning_rate=1e-2,
    steps=60,
    callbacks=[xf.validate([counting], every=20), logger],
)
print(history)  # at the end of a cell, a notebook shows a curve and a table
attention = xf.show_attention(model, counting[0, :8])
print(attention.maps["decoder"].weights.shape)  # (layers, heads, queries, keys)
