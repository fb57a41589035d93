"""Adapt a model with matrices of low rank, and write them as PEFT does."""

import tempfile
from pathlib import Path

import numpy as np

import xformer as xf

sizes = {"vocab_size": 50, "d_model": 32, "num_heads": 4, "d_ff": 64, "num_layers": 2}
config = xf.LanguageModelConfig(
    **sizes, positions="learned", activation="relu", dropout=0.0
)
# Or xf.load_pretrained(directory, quantize="int8").
base = xf.LanguageModel(config, seed=0)
text = np.random.default_rng(0).integers(3, 50, (4, 17))


def loss_fn(model, tokens, rng):
    """Return the sum of the cross-entropies of all next tokens."""
    losses = xf.cross_entropy(model(tokens[:, :-1], rng=rng), tokens[:, 1:])
    return xf.array_namespace(losses).sum(losses)


model = xf.lora(base, rank=4, alpha=8)
trainable = sum(array.size for _, array in model.named_trainable_parameters())
print(f"{trainable:,} of {model.parameter_count():,} numbers are trained")

model, history = xf.fit(
    model, loss_fn, [text],
    optimizer=xf.AdamW(), learning_rate=5e-3, steps=60, num_tokens=lambda tokens: 64,
)  # fmt: skip
print(f"loss {history[0].loss:.2f} -> {history[-1].loss:.2f}")

with tempfile.TemporaryDirectory() as folder:
    xf.save_lora(model, Path(folder) / "adapters", model_type="opt")
    print(sorted(path.name for path in (Path(folder) / "adapters").iterdir()))

merged = xf.merge_lora(model)
assert np.allclose(merged(text), model(text), atol=1e-4)
