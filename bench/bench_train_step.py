"""A train step (forward, backward, Adam) against torch: a small model and the paper's base model.

    pytest bench/bench_train_step.py --benchmark-only -s

No dropout, no padding, float32, the same weights at first; the first losses are compared. torch runs the fastest of its
Adams; torch.compile takes part where it builds.
"""

from __future__ import annotations

from typing import Any

import pytest
from race import Recorder, peer, xformer

from xformer.benchmarks import training

TURNS = 15
SIZES = [
    {"batch": 64, "length": 32, "heads": 8, "head_dim": 32, "layers": 3, "vocabulary": 1000},
    {"batch": 128, "length": 32, "heads": 8, "head_dim": 64, "layers": 6, "vocabulary": 8000},
]


@pytest.mark.parametrize("sizes", SIZES, ids=lambda sizes: f"{sizes['layers']}+{sizes['layers']}-layers")
def test_train_step(benchmark: Any, recorder: Recorder, sizes: dict[str, int]) -> None:
    entries = [
        # On other libraries than NumPy, a train step of ours is for their devices, not for speed on this one.
        *xformer("xformer.benchmarks.training:work", ("numpy", "cupy")),
        peer("torch", "peers.torch_training:work"),
        peer("torch.compile", "peers.torch_training:work", compiled=True),
    ]
    recorder.race(benchmark, "train-step", training.case(sizes), entries, TURNS)
