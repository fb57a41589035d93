"""An encoder stack against nn.TransformerEncoder, and the overhead of a small model.

    pytest bench/bench_encoder.py --benchmark-only -s

All implementations have the same weights, and outputs are compared before anything is timed. torch is in inference
mode, where its encoder takes the fast path; torch.compile is measured too if it works here.
"""

from __future__ import annotations

from typing import Any

import pytest
from recorder import Recorder, baseline, xformer_specs
from workloads import small_model, stacks

from xformer.benchmarks.interleaved import Spec

ROUNDS = 15
BASE = {"heads": 8, "head_dim": 64, "layers": 6}
ENCODERS = [{"batch": batch, "length": length, **BASE} for batch, length in ((8, 512), (1, 32), (32, 128))]
SMALL = {"batch": 1, "length": 16, "heads": 4, "head_dim": 16, "layers": 2, "vocabulary": 1000}


def torch_specs(function: str) -> list[Any]:
    return [
        baseline("torch", f"baselines.torch_models:{function}"),
        baseline("torch.compile", f"baselines.torch_models:{function}", compiled=True),
    ]


@pytest.mark.parametrize("sizes", ENCODERS, ids=lambda sizes: f"{sizes['batch']}x{sizes['length']}")
def test_encoder(benchmark: Any, recorder: Recorder, sizes: dict[str, int]) -> None:
    specs = [*xformer_specs("workloads.stacks:build_encoder"), *torch_specs("build_encoder")]
    packed = {"backend": "numpy", "packed": True}
    specs.insert(1, Spec("xformer numpy, packed, jit", "workloads.stacks:build_encoder", packed))
    recorder.measure(benchmark, "encoder", stacks.encoder_workload(sizes), specs, ROUNDS)


@pytest.mark.parametrize("sizes", [SMALL, {**SMALL, "batch": 4, "gradient": True}], ids=["forward", "gradient"])
def test_small_model(benchmark: Any, recorder: Recorder, sizes: dict[str, Any]) -> None:
    specs = [*xformer_specs("workloads.small_model:build"), *torch_specs("build_model")]
    settings = {"backend": "numpy", "jit": True}
    specs.insert(1, Spec("xformer numpy, jit", "workloads.small_model:build", settings))
    recorder.measure(benchmark, "small-model", small_model.workload(sizes), specs, ROUNDS)
