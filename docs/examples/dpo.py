"""Train a model to prefer one answer to another, by DPO with LoRA."""

import numpy as np

import xformer as xf
from xformer.training import Documents, PackedBatch

sizes = {"vocab_size": 50, "d_model": 32, "num_heads": 4, "d_ff": 64, "num_layers": 2}
# Or xf.load_pretrained(directory).
base = xf.LanguageModel(xf.LanguageModelConfig(**sizes, dropout=0.0), seed=0)
prompts, good, bad = (
    np.random.default_rng(seed).integers(3, 50, (8, 5)).tolist() for seed in range(3)
)


def rows(answers):
    """Return a batch with a prompt and its answer in each row; answers have labels."""
    tokens = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
    masks = [
        [0] * len(prompt) + [1] * len(answer)
        for prompt, answer in zip(prompts, answers, strict=True)
    ]
    return PackedBatch.make(Documents(tokens, masks), xp=np)


def loss_fn(model, batch, rng):
    """Return the sum of the losses of all pairs."""
    chosen, rejected, *reference = batch
    policy = [xf.sequence_log_probs(model, rows, rng) for rows in (chosen, rejected)]
    losses = xf.dpo_loss(*policy, *reference, beta=0.1)
    return xf.array_namespace(losses).sum(losses)


pairs = rows(good), rows(bad)
# The log-probabilities of the model without adapters, computed once.
reference = [xf.sequence_log_probs(base, batch) for batch in pairs]
model, history = xf.fit(
    xf.lora(base, rank=4),
    loss_fn,
    [(*pairs, *reference)],
    optimizer=xf.AdamW(),
    learning_rate=5e-3,
    steps=40,
    num_tokens=lambda batch: len(prompts),
)
print(f"loss {history[0].loss:.3f} -> {history[-1].loss:.3f}")  # log(2) before training

chosen, rejected = (xf.sequence_log_probs(model, batch) for batch in pairs)
assert np.all(chosen - rejected > reference[0] - reference[1])
