"""Training steps of the tiny Shakespeare recipe (nanoGPT's CPU setting) against eager torch.

    pytest bench/bench_language_model.py --benchmark-only -s
    python bench/bench_language_model.py                        # the whole training in torch

Model, batches and optimizer are those of docs/recipes/tinyshakespeare.toml; torch has nanoGPT's model with the same
parameters. The text (input.txt) is read from ../shared/data/tinyshakespeare or the directory XFORMER_TINYSHAKESPEARE;
if it is missing, random characters are used. Both use all cores; xformer runs once with whole batches and once with one
shard per core. Takes about two minutes.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from baselines import language_model
from recorder import ROOT, Recorder, baseline

from xformer.benchmarks.interleaved import Spec, Workload
from xformer.benchmarks.machine import describe_machine

ROUNDS = 15
STEPS = 25  # per round
DATA = Path(os.environ.get("XFORMER_TINYSHAKESPEARE", ROOT.parent / "shared" / "data" / "tinyshakespeare"))
RECIPE = ROOT / "docs" / "recipes" / "tinyshakespeare.toml"
SHARDS = (1, 2)


def texts() -> tuple[list[int], list[int], int]:
    """Return the training and validation text as token ids, and the vocabulary size."""
    from xformer.runs.recipe import Recipe
    from xformer.text.corpus import TextPart
    from xformer.tokenizers import Tokenizer

    if not (DATA / "input.txt").is_file():
        import numpy as np

        ids = np.random.default_rng(0).integers(4, 69, 100_000).tolist()
        return ids[10_000:], ids[:10_000], 69
    recipe = Recipe.from_toml(RECIPE)
    parts = TextPart([DATA / "input.txt"]).split(recipe.training.valid_share)
    train, valid = ("".join(part) for part in parts)
    tokenizer = Tokenizer.train([train], **recipe.tokenizer.to_dict())
    return tokenizer.encode_text(train), tokenizer.encode_text(valid), tokenizer.vocab_size


def make_settings() -> tuple[dict[str, Any], list[int]]:
    """Return the settings of the implementations, and the validation text."""
    import dataclasses

    from xformer.models import LanguageModelConfig
    from xformer.runs.recipe import Recipe

    recipe = Recipe.from_toml(RECIPE)
    train, valid, vocab_size = texts()
    training = dataclasses.asdict(recipe.training)
    settings = {
        "model": LanguageModelConfig(vocab_size=vocab_size, **recipe.model).to_dict(),
        "training": training,
        "text": train,
        "steps": STEPS,
    }
    return settings, valid


@pytest.mark.parametrize("shards", SHARDS)
def test_language_model(benchmark: Any, recorder: Recorder, shards: int) -> None:
    settings, _ = make_settings()
    training = settings["training"]
    tokens = STEPS * training["context_length"] * training["batch_size"]
    name = f"tiny Shakespeare, {STEPS} steps, {shards} shard{'s' if shards > 1 else ''}"
    specs = [
        Spec("xformer numpy", "baselines.language_model:build_xformer", {"shards": shards}),
        baseline("torch", "baselines.language_model:build_torch"),
    ]
    recorder.measure(benchmark, "language-model", Workload(name, settings, (tokens,)), specs, ROUNDS)


def train_torch() -> None:
    """Print torch's learning curve with each of its implementations of AdamW."""
    settings, valid = make_settings()
    print(describe_machine())
    for implementation in ("foreach", "fused"):
        for step, total, validating, loss in language_model.torch_training(settings, valid, implementation):
            print(
                f"torch, AdamW {implementation}: step {step}  {total:.1f} s, validation {validating:.1f} s  "
                f"loss {loss:.4f}"
            )


if __name__ == "__main__":
    train_torch()
