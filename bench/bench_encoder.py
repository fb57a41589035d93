"""An encoder stack against nn.TransformerEncoder, and what a small model costs beside its arithmetic.

    pytest bench/bench_encoder.py --benchmark-only -s

Identical weights on both sides; outputs are compared before anything is timed. torch is in inference mode, where its
encoder takes the fast path; torch.compile takes part where it builds.
"""

from __future__ import annotations

from typing import Any

import pytest
from race import Recorder, peer, xformer
from works import small_model

from xformer.benchmarks import stacks

TURNS = 15
BASE = {"heads": 8, "head_dim": 64, "layers": 6}
ENCODERS = [{"batch": batch, "length": length, **BASE} for batch, length in ((8, 512), (1, 32), (32, 128))]
SMALL = {"batch": 1, "length": 16, "heads": 4, "head_dim": 16, "layers": 2, "vocabulary": 1000}


def peers(function: str) -> list[Any]:
    return [
        peer("torch", f"peers.torch_models:{function}"),
        peer("torch.compile", f"peers.torch_models:{function}", compiled=True),
    ]


@pytest.mark.parametrize("sizes", ENCODERS, ids=lambda sizes: f"{sizes['batch']}x{sizes['length']}")
def test_encoder(benchmark: Any, recorder: Recorder, sizes: dict[str, int]) -> None:
    entries = [*xformer("xformer.benchmarks.stacks:encoder"), *peers("encoder")]
    recorder.race(benchmark, "encoder", stacks.encoder_case(sizes), entries, TURNS)


def test_small_model(benchmark: Any, recorder: Recorder) -> None:
    entries = [*xformer("works.small_model:work"), *peers("forward")]
    recorder.race(benchmark, "small-model", small_model.case(SMALL), entries, TURNS)
