"""Trace a whole training step, the update of the optimizer included, and repeat it."""

import numpy as np

import xformer as xf
from xformer.training import AdamW, train_step

sizes = {
    "d_model": 64,
    "num_heads": 4,
    "d_ff": 256,
    "num_encoder_layers": 2,
    "num_decoder_layers": 2,
}
config = xf.TransformerConfig(
    source_vocab_size=1000, target_vocab_size=1000, dropout=0.1, **sizes
)
optimizer = AdamW(weight_decay=0.1)


def loss_fn(model, batch, rng):
    """Return the summed cross-entropy."""
    source, target, labels = batch
    losses = xf.ops.cross_entropy(model(source, target, rng=rng), labels, pad_id=0)
    return xf.array_namespace(losses).sum(losses)


def step(model, state, batch, rng, learning_rate):
    """Make one update in the memory of the model and the state."""
    return train_step(
        model,
        state,
        [batch],
        rng,
        loss_fn=loss_fn,
        optimizer=optimizer,
        learning_rate=learning_rate,
        max_grad_norm=1.0,
        num_tokens=batch[2].size,
        donate=True,
    )


def train(step):
    """Make five updates; return the parameters and the losses."""
    model = xf.Transformer(config, seed=0)
    # Numbers that change are arrays.
    state = optimizer.init(model)._replace(step=np.asarray(0.0))
    data, losses = np.random.default_rng(0), []
    for number in range(1, 6):
        batch = tuple(data.integers(3, 1000, (3, 4, 16)))
        rng = xf.Rng(0).with_counter(np.asarray(number))
        model, state, loss, _ = step(
            model, state, batch, rng, np.asarray(1e-3 / number)
        )
        losses.append(float(loss))
    return dict(model.named_parameters()), losses


# The first step is traced.
parameters, losses = train(xf.jit(step, donate_argnums=(0, 1)))
expected, expected_losses = train(step)
assert losses == expected_losses
assert all(np.array_equal(parameters[name], expected[name]) for name in expected)
print("losses", *(f"{loss:.4f}" for loss in losses))
