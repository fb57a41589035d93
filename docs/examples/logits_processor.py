"""Steer generation with a logits processor and a stopping criterion of your own."""

import numpy as np

import xformer as xf

config = xf.LanguageModelConfig(
    vocab_size=20, d_model=16, num_heads=2, d_ff=32, num_layers=1
)
model = xf.LanguageModel(config, xp=np, seed=0)


def only_even_tokens(tokens, lengths, logits):
    """Mask odd tokens. tokens: (rows, longest), logits: (rows, vocab_size)."""
    xp = xf.array_namespace(logits)
    is_odd = xp.arange(logits.shape[-1]) % 2 == 1
    return xp.where(is_odd, -xp.inf, logits)


def stop_at_eight(tokens, lengths):
    """End a row once its last token is 8."""
    return tokens[:, -1] == 8


outputs = xf.generate(
    model,
    [[5, 3], [7]],  # prompts
    max_new_tokens=10,
    temperature=1.0,
    rng=xf.Rng(0),
    logits_processors=[only_even_tokens],
    stopping_criteria=[stop_at_eight],
)
for hypotheses in outputs:
    tokens = hypotheses[0].tokens
    print(tokens)
    assert all(token % 2 == 0 for token in tokens)
