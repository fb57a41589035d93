"""What blocks of `record` and `intervene` cost while a language model decodes, compared with decoding without them.

python bench/taps.py SmolLM2-135M-Instruct.gguf

Each round decodes the same number of tokens in each way, one after the other. A figure is the median of the
rounds, of the median time of a step.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from typing import Any

import numpy as np

import xformer as xf

PROMPT = [1, 504, 2365, 282, 4649, 314, 253, 1022, 1000, 2000, 30, 40]
FIRST = 4  # steps before the program runs


def time_step(model: Any, block: Any, num_tokens: int, clock: Any) -> float:
    """Return the median time of a step in milliseconds."""
    with block:
        updates = xf.stream(model, [PROMPT], max_new_tokens=num_tokens, suppress_tokens=[model.config.eos_id])
        times = [clock() for _ in updates]
    return 1e3 * float(np.median(np.diff(times)[FIRST:]))


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("model")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--cpu", action="store_true", help="measure processor time")
    args = parser.parse_args()
    model = xf.load_pretrained(args.model)
    clock = time.process_time if args.cpu else time.perf_counter
    vector = np.random.default_rng(0).normal(0.0, 0.1, model.config.d_model).astype(np.float32)
    residuals, middle = "layers.*.residual_out", f"layers.{len(model.layers) // 2}.residual_out"
    ways: dict[str, Any] = {
        "plain": contextlib.nullcontext,
        "a steering vector at a layer": lambda: xf.intervene(model, {middle: lambda x: x + vector}),
        "residuals of all layers": lambda: xf.record(model, residuals, every_call=True),
        "attention weights of all layers": lambda: xf.record(model, "*attention.weights", every_call=True),
        "both": lambda: xf.record(model, [residuals, "*attention.weights"], every_call=True),
    }
    for block in ways.values():  # traces
        time_step(model, block(), 12, clock)
    times = np.asarray(
        [[time_step(model, block(), args.tokens, clock) for block in ways.values()] for _ in range(args.rounds)]
    )
    print("| | ms per token | of plain |\n|---|---|---|")
    for name, column in zip(ways, times.T, strict=True):
        print(f"| {name} | {np.median(column):.2f} | {np.median(column / times[:, 0]):.3f} |")


if __name__ == "__main__":
    main()
