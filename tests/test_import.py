"""`import xformer` in a fresh interpreter loads NumPy and nothing heavier."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import xformer

ROOT = Path(__file__).parents[1]

# Loaded by the functions and commands that need them.
NOT_LOADED = {
    "array_api_strict",
    "cupy",
    "jax",
    "matplotlib",
    "mlflow",
    "numba",
    "rich",
    "sacrebleu",
    "safetensors.numpy",
    "tensorboardX",
    "tokenizers",
    "torch",
    "typer",
    "wandb",
}

PROGRAM = """
import json, sys, time
start = time.perf_counter()
import xformer
seconds = time.perf_counter() - start
print(json.dumps({"modules": sorted(sys.modules), "seconds": seconds}))
"""


def test_import_loads_no_optional_package():
    done = subprocess.run([sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, check=True)
    report = json.loads(done.stdout)
    print(f"import xformer: {report['seconds'] * 1e3:.0f} ms beyond Python's start")
    assert "xformer.errors" in report["modules"]
    assert NOT_LOADED.intersection(report["modules"]) == set()


def test_the_first_hour_needs_only_the_top_level_names():
    """Define a module, train it, generate, save and load."""
    names = [
        "Module", "Linear", "LayerNorm", "MultiHeadAttention", "Embedding", "Initializer", "Transformer",
        "TransformerConfig", "LanguageModel", "LanguageModelConfig", "AdamW", "SGD", "schedules", "fit",
        "train_step", "validate", "print_every", "cross_entropy", "value_and_grad", "grad", "vjp", "remat",
        "Rng", "masks", "generate", "GenerationConfig", "LogitsProcessor", "StoppingCriteria", "Translator",
        "Summarizer", "TextGenerator", "load", "set_num_threads", "array_namespace", "kernels",
    ]  # fmt: skip
    assert set(names) <= set(xformer.__all__)
    assert all(hasattr(xformer, name) for name in names)
