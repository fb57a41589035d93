"""Trace a function once, and repeat its array operations without its Python code."""

import numpy as np

import xformer as xf

config = xf.LanguageModelConfig(
    vocab_size=50, d_model=32, num_heads=4, d_ff=64, num_layers=2
)
model = xf.LanguageModel(config, seed=0)


def loss_fn(model, tokens, labels):
    """Return the mean cross-entropy."""
    losses = xf.ops.cross_entropy(model(tokens), labels)
    return xf.array_namespace(losses).mean(losses)


forward = xf.jit(model)
gradient = xf.jit(xf.value_and_grad(loss_fn))

rng = np.random.default_rng(0)
for _ in range(5):  # the first call traces, later ones run the program
    tokens = rng.integers(0, 50, (2, 16))
    logits = forward(tokens)
    loss, grads = gradient(model, tokens[:, :-1], tokens[:, 1:])

assert np.array_equal(logits, model(tokens))
print(f"loss {float(loss):.4f}, logits {logits.shape}")
