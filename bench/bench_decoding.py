"""Decoding, greedily and by a beam of five, against CTranslate2 and Hugging Face's generate with identical weights.

    pytest bench/bench_decoding.py --benchmark-only -s

6+6 layers, d_model 512, d_ff 2048, vocabulary 8000, 48 tokens from sources of 32 (a post-norm translator, which is
Marian's architecture), and a language model of GPT-2's architecture. All must write the very same tokens before
anything is timed; only CTranslate2 with weights in int8 may differ, and the table says by how much.
"""

from __future__ import annotations

from typing import Any

import pytest
from race import Recorder, peer, xformer
from works import language_model_decoding

from xformer.benchmarks import Entry, decoding

TURNS = 9
MODEL = {"length": 32, "heads": 8, "head_dim": 64, "layers": 6, "vocabulary": 8000}
BATCHES = (8, 1, 32)


def entries(ours: str, function: str) -> list[Entry]:
    """xformer on NumPy, where it decodes fastest on a CPU, and on a GPU where there is one; and the peers."""
    return [
        *xformer(ours, ("numpy", "cupy")),
        peer("CTranslate2 float32", f"peers.ctranslate2_decoding:{function}", compute_type="float32"),
        peer("CTranslate2 int8", f"peers.ctranslate2_decoding:{function}", checked=False, compute_type="int8"),
        peer("Hugging Face", f"peers.huggingface_decoding:{function}"),
    ]


@pytest.mark.parametrize("beam", [1, 5], ids=["greedy", "beam-5"])
@pytest.mark.parametrize("batch", BATCHES, ids=lambda batch: f"batch-{batch}")
def test_translation(benchmark: Any, recorder: Recorder, batch: int, beam: int) -> None:
    case = decoding.case({**MODEL, "batch": batch, "beam": beam})
    recorder.race(benchmark, "decoding", case, entries("xformer.benchmarks.decoding:work", "work"), TURNS)


@pytest.mark.parametrize("batch", BATCHES, ids=lambda batch: f"batch-{batch}")
def test_language_model(benchmark: Any, recorder: Recorder, batch: int) -> None:
    case = language_model_decoding.case({**MODEL, "batch": batch})
    contenders = entries("works.language_model_decoding:work", "continuing")
    recorder.race(benchmark, "language-model-decoding", case, contenders, TURNS)
