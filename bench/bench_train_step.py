"""Training step (forward, backward, Adam) against torch: a small model and the base model of the paper.

    pytest bench/bench_train_step.py --benchmark-only -s

Float32 without dropout or padding, from the same initial weights; the first losses are compared. torch runs the fastest
of its Adam implementations; torch.compile is measured too if it works here.
"""

from __future__ import annotations

from typing import Any

import pytest
from recorder import Recorder, baseline, xformer_specs
from workloads import training

ROUNDS = 15
SIZES = [
    {"batch": 64, "length": 32, "heads": 8, "head_dim": 32, "layers": 3, "vocabulary": 1000},
    {"batch": 128, "length": 32, "heads": 8, "head_dim": 64, "layers": 6, "vocabulary": 8000},
]


@pytest.mark.parametrize("sizes", SIZES, ids=lambda sizes: f"{sizes['layers']}+{sizes['layers']}-layers")
def test_train_step(benchmark: Any, recorder: Recorder, sizes: dict[str, int]) -> None:
    specs = [
        # On a CPU, training with xformer is fastest on NumPy; other libraries are for their devices.
        *xformer_specs("workloads.training:build", ("numpy", "cupy")),
        baseline("torch", "baselines.torch_training:build"),
        baseline("torch.compile", "baselines.torch_training:build", compiled=True),
    ]
    recorder.measure(benchmark, "train-step", training.workload(sizes), specs, ROUNDS)
