"""Look inside a language model: record activations, change and differentiate them."""

import numpy as np

import xformer as xf
from xformer import interpret

config = xf.LanguageModelConfig(
    vocab_size=50, d_model=32, num_heads=4, d_ff=64, num_layers=2, positions="rotary"
)
model = xf.LanguageModel(config, seed=0)
tokens, other = np.asarray([[5, 9, 7, 9]]), np.asarray([[5, 8, 7, 8]])

# Record by name or pattern: xf.activation_names(model) has all names.
names = ["layers.*.self_attention.weights", "layers.1.residual_out"]
with xf.record(model, names) as activations:
    logits = model(tokens)
weights = activations["layers.0.self_attention.weights"]
print(weights.shape)  # (batch, heads, queries, keys)

# Change: set the third head of the first layer to zero, and take the output of a
# feed-forward network from another run.
with xf.record(model, "layers.1.feed_forward.output") as from_other:
    model(other)


def without_third_head(heads):
    heads[:, 2, :, :] = 0.0  # a copy; return the changed array
    return heads


changes = {"layers.0.self_attention.heads": without_third_head, **from_other}
with xf.intervene(model, changes):
    changed = model(tokens)
assert not np.allclose(changed, logits)


# The gradient with respect to an activation is that of a zero array added to it.
def loss(shift):
    with xf.intervene(model, {"layers.0.residual_out": lambda x: x + shift}):
        return interpret.logit_difference(3, 4)(model(tokens))


gradient = xf.grad(loss)(np.zeros((1, 4, 32), np.float32))
print(gradient.shape)

# Every step of a generation.
with xf.record(model, "layers.1.self_attention.weights", every_call=True) as steps:
    xf.generate(model, tokens, max_new_tokens=3)
print([weights.shape for weights in steps["layers.1.self_attention.weights"]])

# Analyses are functions of a model and tokens.
metric = interpret.logit_difference(3, 4)  # after the last position
effects = interpret.activation_patching(model, tokens, other, metric)
print(effects.round(2))  # (layers, positions)
print(interpret.induction_scores(model, length=20).round(2))  # (layers, heads)
