"""Train a language model with a mixture of experts, and look at their use."""

import numpy as np

import xformer as xf

config = xf.LanguageModelConfig(
    vocab_size=20, d_model=32, num_heads=4, d_ff=32, num_layers=2, dropout=0.0,
    norm="rms", activation="swiglu", positions="rotary",
    num_experts=4, num_experts_per_token=2,
)  # fmt: skip


def loss_fn(model, tokens, rng):
    """Return the sum of the losses of the tokens, with that of load balancing."""
    labels = tokens[:, 1:]
    with xf.record_routing() as routing:
        logits = model(tokens[:, :-1], rng=rng)
    losses = xf.cross_entropy(logits, labels)
    return xf.array_namespace(losses).sum(
        losses
    ) + 0.01 * losses.size * xf.load_balancing_loss(routing)


starts = np.random.default_rng(0).integers(3, 20, (50, 16, 1))
# Sequences that count in steps of 3, modulo 17.
batches = [3 + (start + 3 * np.arange(12)) % 17 for start in starts]
model, history = xf.fit(
    xf.LanguageModel(config), loss_fn, batches,
    optimizer=xf.AdamW(), learning_rate=1e-2, steps=100,
    num_tokens=lambda tokens: tokens[:, 1:].size,
)  # fmt: skip
assert history[-1].loss < 0.3 * history[0].loss

with xf.record_routing() as routing:
    model(batches[0])
for number, layer in enumerate(routing):
    shares = np.bincount(layer.experts.reshape(-1), minlength=4) / layer.experts.size
    print(f"layer {number}: {shares.round(2)}")
