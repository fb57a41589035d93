"""The most memory that attention takes, forward and backward, against the length of the sentence.

    pytest bench/bench_memory.py --benchmark-only -s

Each measurement is a process of its own, which does the work once or twice; what counts is the peak of its resident
memory beyond libraries and inputs. One head of 64 features, so that the textbook version, which holds the scores of all
queries and keys several times (1 GiB each at 16,384 tokens), fits where the others do.
"""

from __future__ import annotations

from typing import Any

import pytest
from race import Recorder, peer, xformer

from xformer.benchmarks import attention

LENGTHS = (1024, 2048, 4096, 8192, 16384)
SIZES = {"batch": 1, "heads": 1, "head_dim": 64, "padded": False, "backward": True, "layer": False}
PEAKS: dict[tuple[str, bool, int], int] = {}  # contender, causal, length -> bytes


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("length", LENGTHS)
def test_memory(benchmark: Any, recorder: Recorder, length: int, causal: bool) -> None:
    case = attention.memory_case({**SIZES, "length": length, "causal": causal})
    entries = [
        *xformer("xformer.benchmarks.attention:work", ("numpy", "torch", "jax")),
        peer("torch SDPA", "peers.torch_attention:core"),
        peer("textbook NumPy", "baselines.naive_attention:work"),
    ]
    for each in recorder.race(benchmark, "memory", case, entries, turns=1)["contenders"]:
        if each["peak_bytes"] is None:
            continue
        PEAKS[each["name"], causal, length] = each["peak_bytes"]
        before = PEAKS.get((each["name"], causal, length // 4))
        if length == LENGTHS[-1] and before:
            kind = "causal" if causal else "full"
            growth = each["peak_bytes"] / before
            recorder.note("memory", f"{each['name']}, {kind}: {growth:.1f} times the memory for 4 times the length")
