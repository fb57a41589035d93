"""Attention, its core and its layer, forward and backward, against torch and against the textbook in NumPy.

    pytest bench/bench_attention.py --benchmark-only -s

xformer runs on every library that is installed. torch has scaled_dot_product_attention, and for the layer
nn.MultiheadAttention with identical weights; answers and gradients are compared before anything is timed.
"""

from __future__ import annotations

from typing import Any

import pytest
from race import Recorder, peer, xformer

from xformer.benchmarks import attention

TURNS = 15
# (batch, heads, length, head_dim)
CORE = [(8, 8, 512, 64), (1, 8, 2048, 64), (2, 12, 1024, 64), (32, 8, 128, 64), (64, 8, 32, 32)]
LAYER = [(128, 8, 32, 64), (32, 8, 128, 64), (8, 8, 512, 64), (2, 8, 2048, 64)]  # 4096 tokens, d_model 512
FLAGS = [
    (causal, padded, backward) for backward in (False, True) for padded in (False, True) for causal in (False, True)
]


def cases(shapes: list[tuple[int, ...]], *, layer: bool) -> list[Any]:
    """Every shape, causal or not, padded or not, forward and with backward; padding of the first shape alone."""
    found = []
    for shape in shapes:
        sizes = dict(zip(("batch", "heads", "length", "head_dim"), shape, strict=True))
        for causal, padded, backward in FLAGS:
            if padded and shape != shapes[0]:
                continue
            flags = {"causal": causal, "padded": padded, "backward": backward, "layer": layer}
            case = attention.case({**sizes, **flags})
            found.append(pytest.param(case, id=case.name.replace(" ", "-")))
    return found


@pytest.mark.parametrize("case", cases(CORE, layer=False))
def test_attention(benchmark: Any, recorder: Recorder, case: Any) -> None:
    entries = [
        *xformer("xformer.benchmarks.attention:work"),
        peer("torch SDPA", "peers.torch_attention:core"),
        peer("textbook NumPy", "baselines.naive_attention:work"),
    ]
    recorder.race(benchmark, "attention", case, entries, TURNS)


@pytest.mark.parametrize("case", cases(LAYER, layer=True))
def test_multi_head_attention(benchmark: Any, recorder: Recorder, case: Any) -> None:
    entries = [
        *xformer("xformer.benchmarks.attention:work"),
        peer("torch nn.MultiheadAttention", "peers.torch_attention:layer"),
    ]
    recorder.race(benchmark, "multi-head-attention", case, entries, TURNS)
