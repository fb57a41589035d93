"""Scaled dot-product and multi-head attention, forward and backward, against torch and textbook NumPy.

    pytest bench/bench_attention.py --benchmark-only -s

xformer runs on every installed library, torch runs scaled_dot_product_attention, or nn.MultiheadAttention with the same
weights. Outputs and gradients are compared before anything is timed.
"""

from __future__ import annotations

from typing import Any

import pytest
from recorder import Recorder, baseline, xformer_specs

from xformer.benchmarks import parts

ROUNDS = 15
# (batch, heads, length, head_dim)
CORE = [(8, 8, 512, 64), (1, 8, 2048, 64), (2, 12, 1024, 64), (32, 8, 128, 64), (64, 8, 32, 32)]
LAYER = [(128, 8, 32, 64), (32, 8, 128, 64), (8, 8, 512, 64), (2, 8, 2048, 64)]  # 4096 tokens, d_model 512
FLAGS = [
    (causal, padded, backward) for backward in (False, True) for padded in (False, True) for causal in (False, True)
]


def workloads(shapes: list[tuple[int, ...]], part: str) -> list[Any]:
    """Return all combinations of shapes and flags; only the first shape is padded."""
    parameters = []
    for shape in shapes:
        sizes = dict(zip(("batch", "heads", "length", "head_dim"), shape, strict=True))
        for causal, padded, backward in FLAGS:
            if padded and shape != shapes[0]:
                continue
            flags = {"causal": causal, "padded": padded, "backward": backward, "part": part}
            workload = parts.workload({**sizes, **flags})
            parameters.append(pytest.param(workload, id=workload.name.replace(" ", "-")))
    return parameters


@pytest.mark.parametrize("workload", workloads(CORE, "attention"))
def test_attention(benchmark: Any, recorder: Recorder, workload: Any) -> None:
    specs = [
        *xformer_specs("xformer.benchmarks.parts:build"),
        baseline("torch SDPA", "baselines.torch_attention:build_attention"),
        baseline("textbook NumPy", "baselines.naive_attention:build"),
    ]
    recorder.measure(benchmark, "attention", workload, specs, ROUNDS)


@pytest.mark.parametrize("workload", workloads(LAYER, "layer"))
def test_multi_head_attention(benchmark: Any, recorder: Recorder, workload: Any) -> None:
    specs = [
        *xformer_specs("xformer.benchmarks.parts:build"),
        baseline("torch nn.MultiheadAttention", "baselines.torch_attention:build_layer"),
    ]
    if not workload.settings["backward"]:
        name = "torch nn.MultiheadAttention, no fast path"
        specs.append(baseline(name, "baselines.torch_attention:build_layer", fast_path=False))
    recorder.measure(benchmark, "multi-head-attention", workload, specs, ROUNDS)
