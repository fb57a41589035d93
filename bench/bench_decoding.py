"""Greedy and beam search against CTranslate2 and Hugging Face's generate with the same weights.

    pytest bench/bench_decoding.py --benchmark-only -s

6+6 layers, d_model 512, d_ff 2048, vocabulary 8000, 48 tokens from sources of 32 (a post-norm translator, which is
Marian's architecture), and a language model of GPT-2's architecture. All must write the same tokens before anything is
timed; only int8 weights may change tokens, and the table shows how many.
"""

from __future__ import annotations

from typing import Any

import pytest
from recorder import Recorder, baseline, xformer_specs
from workloads import decoding, language_model_decoding

from xformer.benchmarks.interleaved import Spec

ROUNDS = 9
MODEL = {"length": 32, "heads": 8, "head_dim": 64, "layers": 6, "vocabulary": 8000}
BATCHES = (8, 1, 32)


def decoding_specs(factory: str, function: str) -> list[Spec]:
    """Return xformer on NumPy, its fastest library on a CPU, also in int8, on CuPy if available, and the baselines."""
    return [
        *xformer_specs(factory, ("numpy", "cupy")),
        Spec("xformer numpy, int8", factory, {"backend": "numpy", "quantize": "int8"}),
        baseline("CTranslate2 float32", f"baselines.ctranslate2_decoding:{function}", compute_type="float32"),
        baseline("CTranslate2 int8", f"baselines.ctranslate2_decoding:{function}", compute_type="int8"),
        baseline("Hugging Face", f"baselines.huggingface_decoding:{function}"),
    ]


@pytest.mark.parametrize("beam", [1, 5], ids=["greedy", "beam-5"])
@pytest.mark.parametrize("batch", BATCHES, ids=lambda batch: f"batch-{batch}")
def test_translation(benchmark: Any, recorder: Recorder, batch: int, beam: int) -> None:
    workload = decoding.workload({**MODEL, "batch": batch, "beam": beam})
    specs = decoding_specs("workloads.decoding:build", "build")
    recorder.measure(benchmark, "decoding", workload, specs, ROUNDS)


@pytest.mark.parametrize("batch", BATCHES, ids=lambda batch: f"batch-{batch}")
def test_language_model(benchmark: Any, recorder: Recorder, batch: int) -> None:
    workload = language_model_decoding.workload({**MODEL, "batch": batch})
    specs = decoding_specs("workloads.language_model_decoding:build", "build_language_model")
    recorder.measure(benchmark, "language-model-decoding", workload, specs, ROUNDS)
