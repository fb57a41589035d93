"""Watch a training run with callbacks, keep the best model, and stop early."""

import numpy as np

import xformer as xf
from xformer.training import Step, Validation

config = xf.LanguageModelConfig(
    vocab_size=8, d_model=16, num_heads=2, d_ff=32, num_layers=1, dropout=0.0
)
counting = np.tile(np.arange(3, 8), (4, 3))  # 3 4 5 6 7 3 4 ...


def loss_fn(model, tokens, rng):
    logits = model(tokens[:, :-1], rng=rng)
    losses = xf.cross_entropy(logits, tokens[:, 1:])
    return xf.array_namespace(losses).sum(losses)


class KeepBest:
    """Remember the model of the best validation."""

    def __init__(self):
        self.model = None

    def __call__(self, event, loop):
        if isinstance(event, Validation) and event.best:
            self.model = loop.model


def stop_when_solved(event, loop):
    """End training once the loss per token is below 0.1."""
    return isinstance(event, Step) and event.loss < 0.1


keep_best = KeepBest()
model, history = xf.fit(
    xf.LanguageModel(config, seed=0),
    loss_fn,
    [counting],
    num_tokens=lambda tokens: tokens[:, 1:].size,
    optimizer=xf.Adam(),
    learning_rate=1e-2,
    steps=500,
    callbacks=[xf.validate([counting], every=20), keep_best, stop_when_solved],
)
print(f"{len(history)} steps, loss {history[-1].loss:.3f}")
assert history[-1].loss < 0.1
assert keep_best.model is not None
