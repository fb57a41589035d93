"""Compute the same numbers for a text alone, in a batch, and token by token."""

import numpy as np

import xformer as xf

xf.use_reproducible_algorithms()
sizes = {"d_model": 256, "num_heads": 4, "d_ff": 1024, "num_layers": 2}
config = xf.LanguageModelConfig(vocab_size=1000, **sizes)
model = xf.LanguageModel(config, xp=np, seed=0)
texts = np.random.default_rng(0).integers(3, 1000, (8, 40))

batch = model(texts)  # (8, 40, 1000)
alone = model(texts[:1])[0]
cache = model.init_cache(1)
steps = [model.decode_step(texts[:1, i : i + 1], cache)[0] for i in range(40)]
equal = [np.array_equal(batch[0], alone), np.array_equal(batch[0], steps)]
print(equal)  # [True, True]; by default only with AVX-512
assert all(equal)
