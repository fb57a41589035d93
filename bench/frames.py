"""Count the frames of the package that one call runs through: `python bench/frames.py`.

Frames and files of xformer/ are counted in the second call, in the thread of the caller; depth is that of the stack.
"""

from __future__ import annotations

import pathlib
import sys
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np

import xformer as xf

ROOT = str(pathlib.Path(xf.__file__).parent)


def count(function: Callable[[], Any]) -> tuple[int, int, int]:
    function()
    frames, files, depth = 0, set(), 0

    def profile(frame: Any, event: str, arg: Any) -> None:
        nonlocal frames, depth
        if event == "call" and frame.f_code.co_filename.startswith(ROOT):
            frames += 1
            files.add(frame.f_code.co_filename)
            here = 0
            while frame is not None:
                here += frame.f_code.co_filename.startswith(ROOT)
                frame = frame.f_back
            depth = max(depth, here)

    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(None)
    return frames, len(files), depth


def loss_fn(model: Any, tokens: Any, rng: Any) -> Any:
    logits = model(tokens[:, :-1], rng=rng)
    return xf.array_namespace(logits).sum(xf.cross_entropy(logits, tokens[:, 1:]))


def calls() -> dict[str, Callable[[], Any]]:
    x = np.ones((2, 20, 64), "f")
    attention = xf.MultiHeadAttention(64, 4, init=0)
    config = xf.LanguageModelConfig(vocab_size=32, d_model=32, num_heads=4, d_ff=64, num_layers=1)
    model = xf.LanguageModel(config, xp=np, seed=0)
    tokens = np.tile(np.arange(3, 32), (4, 1))
    optimizer = xf.AdamW(weight_decay=0.1)
    state = optimizer.init(model)
    options = {"loss_fn": loss_fn, "optimizer": optimizer, "learning_rate": 1e-3, "num_tokens": tokens.size}
    return {
        "attention layer": lambda: attention(x, causal=True),
        "train step": lambda: xf.train_step(model, state, [tokens], None, **options),
        "greedy, 8 tokens": lambda: xf.generate(model, [[3, 4, 5]], max_new_tokens=8),
        "beam 5, 8 tokens": lambda: xf.generate(model, [[3, 4, 5]], max_new_tokens=8, num_beams=5),
    }


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    for name, call in calls().items():
        print("{:17} {:5} frames, {:3} files, depth {}".format(name, *count(call)))
