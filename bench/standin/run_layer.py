"""Count kernels, bytes, copies and waits of layers of language models: `python bench/standin/run_layer.py`."""

import fakecupy as F
import numpy as np

F.start()
from xformer import LanguageModel, LanguageModelConfig, value_and_grad
from xformer.backends import array_namespace, resolve
from xformer.ops import cross_entropy

LLAMA = {
    "activation": "swiglu",
    "positions": "rotary",
    "norm": "rms",
    "attention_bias": False,
    "feed_forward_bias": False,
}
TOKENS, D_MODEL, HEADS = (4, 512), 512, 8
xp = resolve("cupy")


def mean(losses):
    """Return the mean of losses."""
    return array_namespace(losses).mean(losses)


def kernels_of(**settings):
    """Count a forward and backward pass of models with one layer and with two; return the difference."""
    counts = []
    for layers in (1, 2):
        sizes = {"vocab_size": 64, "d_model": D_MODEL, "num_heads": HEADS, "num_layers": layers, "d_ff": 2048}
        model = LanguageModel(LanguageModelConfig(**sizes, **settings), xp="cupy", dtype="bfloat16")
        ids = xp.asarray(np.zeros(TOKENS, np.int64))
        step = value_and_grad(lambda model, ids=ids: mean(cross_entropy(model(ids), ids)))
        step(model)
        F.reset()
        F.counting(True)
        step(model)
        F.counting(False)
        counts.append((dict(F.COUNT), dict(F.BYTES)))
    (one, one_bytes), (two, two_bytes) = counts
    return [
        {key: after.get(key, 0) - before.get(key, 0) for key in after}
        for before, after in ((one, two), (one_bytes, two_bytes))
    ]


for title, settings in (
    ("swiglu, rotary, rms", LLAMA),
    ("gelu_tanh", {"activation": "gelu_tanh", "positions": "learned"}),
    ("relu", {"activation": "relu", "positions": "learned"}),
):
    launches, size = kernels_of(**settings)
    passes = sum(size.values()) / (2 * TOKENS[0] * TOKENS[1] * D_MODEL)
    print(f"layer with {title}, forward and backward: {sum(launches.values())} launches, {passes:.0f} passes")
    for key, count in sorted(launches.items(), key=lambda item: -item[1]):
        if count:
            print(f"   {count:5d}  {size.get(key, 0) / 1e6:10.1f} MB  {key}")
