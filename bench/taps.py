"""What blocks of `record` and `intervene` cost while a language model decodes, compared with decoding without them.

python bench/taps.py SmolLM2-135M-Instruct.gguf

All ways decode together, one step each in turn. The share is the median of those of the steps.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from contextvars import copy_context
from typing import Any

import numpy as np

import xformer as xf

PROMPT = [1, 504, 2365, 282, 4649, 314, 253, 1022, 1000, 2000, 30, 40]
FIRST = 4  # steps before the program runs


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("model")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=48)
    args = parser.parse_args()
    model = xf.load_pretrained(args.model)
    vector = np.random.default_rng(0).normal(0.0, 0.1, model.config.d_model).astype(np.float32)
    residuals, middle = "layers.*.residual_out", f"layers.{len(model.layers) // 2}.residual_out"
    ways: dict[str, Any] = {
        "plain": contextlib.nullcontext,
        "a steering vector at a layer": lambda: xf.intervene(model, {middle: lambda x: x + vector}),
        "residuals of all layers": lambda: xf.record(model, residuals, every_call=True),
        "attention weights of all layers": lambda: xf.record(model, "*attention.weights", every_call=True),
        "both": lambda: xf.record(model, [residuals, "*attention.weights"], every_call=True),
    }
    options = {"max_new_tokens": args.tokens, "suppress_tokens": [model.config.eos_id]}
    rows: list[list[float]] = []
    for _ in range(args.rounds):
        runs = [(copy_context(), contextlib.ExitStack(), xf.stream(model, [PROMPT], **options)) for _ in ways]
        for (context, block, _), way in zip(runs, ways.values(), strict=True):
            context.run(block.enter_context, way())
        for step in range(args.tokens):
            row = []
            for context, _, stream in runs:
                start = time.perf_counter()
                context.run(next, stream)
                row.append(1e3 * (time.perf_counter() - start))
            rows += [row] if step >= FIRST else []
        for context, block, _ in runs:
            context.run(block.close)
    print("| | ms per token | of plain |\n|---|---|---|")
    for name, times in zip(ways, np.asarray(rows).T, strict=True):
        print(f"| {name} | {np.median(times):.2f} | {np.median(times / np.asarray(rows)[:, 0]):.3f} |")


if __name__ == "__main__":
    main()
