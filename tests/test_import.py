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


def test_the_first_hour_needs_only_the_top_level_names(tmp_path):
    """Define a module, train it, generate, save and load."""
    import numpy as np

    class Doubled(xformer.Module):
        linear: xformer.Linear

        def __init__(self):
            self.linear = xformer.Linear(2, 1, init=0)

        def __call__(self, x):
            return 2 * self.linear(x)

    def loss_fn(model, batch, rng):
        x, y = batch
        error = model(x) - y
        return xformer.array_namespace(error).sum(error**2)

    x = np.eye(2, dtype="float32")
    batches = [(x, np.asarray([[1.0], [-1.0]], dtype="float32"))]
    model, history = xformer.fit(Doubled(), loss_fn, batches, optimizer=xformer.Adam(), learning_rate=0.05, steps=60)
    assert history[-1].loss < 0.01 * history[0].loss
    np.testing.assert_allclose(model(x), batches[0][1], atol=0.1)
    config = xformer.LanguageModelConfig(vocab_size=9, d_model=8, num_heads=2, d_ff=8, num_layers=1)
    model = xformer.LanguageModel(config, xp=np, seed=0)
    model.save(tmp_path / "model.safetensors")
    outputs = [
        xformer.generate(each, [[3, 4]], xformer.GenerationConfig(max_new_tokens=3))[0][0].tokens
        for each in (model, xformer.load(tmp_path / "model.safetensors"))
    ]
    assert outputs[0] == outputs[1]
    assert len(outputs[0]) <= 3
