"""A train step (forward, backward, Adam) against torch eager: 3+3 layers, d_model 256, batch 64 of length 32.

    pytest bench/bench_train_step.py --benchmark-only -s        # or, for the table alone:
    python bench/bench_train_step.py [--turns N]

No dropout, no padding, float32, both sides on all cores (XFORMER_NUM_THREADS changes that for both). It takes about a
minute. A ratio above 1 says that xformer is faster. Needs torch; run it on a machine that does nothing else.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import race

TURNS = 15
BATCH, LENGTH, VOCABULARY = 64, 32, 1000
MODEL = {
    "source_vocab_size": VOCABULARY,
    "target_vocab_size": VOCABULARY,
    "d_model": 256,
    "num_heads": 8,
    "d_ff": 1024,
    "num_encoder_layers": 3,
    "num_decoder_layers": 3,
    "dropout": 0.0,
    "share_embeddings": False,
    "tie_output": False,
}


def specification() -> dict[str, Any]:
    """Sentences that are all LENGTH tokens long, the end of sentence included."""
    import numpy as np

    ids = np.random.default_rng(0).integers(4, VOCABULARY, (2, BATCH, LENGTH - 1)).tolist()
    return {
        "model": MODEL,
        "source": ids[0],
        "target": ids[1],
        "batches": [list(range(BATCH))],
        "label_smoothing": 0.0,
        "max_norm": float("inf"),
    }


def test_train_step(benchmark: Any) -> None:
    pytest.importorskip("torch", reason="the comparison needs torch")
    race.run(benchmark, specification(), TURNS)


def main() -> None:
    turns = race.turns(__doc__, TURNS)
    with race.race(specification()) as running:
        for _ in range(turns):
            running.turn()
        print(race.machine(), race.table({"train step": running.summary()}), sep="\n")


if __name__ == "__main__":
    main()
