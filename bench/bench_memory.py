"""Peak memory of attention, forward and backward, by sentence length.

    pytest bench/bench_memory.py --benchmark-only -s

Each measurement runs in a process of its own and reports the peak of its resident memory beyond libraries and inputs.
There is a single head of 64 features, so that the textbook version fits into memory: it keeps several copies of the
attention scores, of 1 GiB each at 16,384 tokens.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from recorder import Recorder, baseline, xformer_specs

from xformer.benchmarks import parts

LENGTHS = (1024, 2048, 4096, 8192, 16384)
SIZES = {"batch": 1, "heads": 1, "head_dim": 64, "padded": False, "backward": True, "part": "attention"}
PEAKS: dict[tuple[str, bool, int], int] = {}  # implementation, causal, length -> bytes


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("length", LENGTHS)
def test_memory(benchmark: Any, recorder: Recorder, length: int, causal: bool) -> None:
    workload = replace(parts.workload({**SIZES, "length": length, "causal": causal}), warmup_steps=0)
    specs = [
        *xformer_specs("xformer.benchmarks.parts:build", ("numpy", "torch", "jax")),
        baseline("torch SDPA", "baselines.torch_attention:build_attention"),
        baseline("textbook NumPy", "baselines.naive_attention:build"),
    ]
    for each in recorder.measure(benchmark, "memory", workload, specs, rounds=1)["implementations"]:
        if each["peak_bytes"] is None:
            continue
        PEAKS[each["name"], causal, length] = each["peak_bytes"]
        before = PEAKS.get((each["name"], causal, length // 4))
        if length == LENGTHS[-1] and before:
            masking = "causal" if causal else "full"
            growth = each["peak_bytes"] / before
            recorder.note("memory", f"{each['name']}, {masking}: {growth:.1f} times the memory for 4 times the length")
