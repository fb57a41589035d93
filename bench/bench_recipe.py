"""Training steps on batches of the Multi30k recipe, including dropout and padding, against eager torch.

    pytest bench/bench_recipe.py --benchmark-only -s

The sizes and the batches are those of docs/recipes/multi30k-de-en.toml, with Adam, without R-Drop, and with the norms,
positions and activation of nn.Transformer; both train on the same random batches and count the same target tokens. The
text (train.de, train.en) is read from ../shared/data/multi30k or the directory XFORMER_MULTI30K; random sentences of
the same lengths are measured too. Takes about two minutes.
"""

from __future__ import annotations

import os
import tomllib
from pathlib import Path
from typing import Any

import pytest
from recorder import ROOT, Recorder, baseline, xformer_specs

from xformer import TransformerConfig
from xformer.benchmarks.interleaved import Workload

ROUNDS = 24
RECIPE = ROOT / "docs" / "recipes" / "multi30k-de-en.toml"
PLAIN = {"norm": "layer", "activation": "relu", "qk_norm": False, "positions": "sinusoidal"}  # as in nn.Transformer
DATA = Path(os.environ.get("XFORMER_MULTI30K", ROOT.parent / "shared" / "data" / "multi30k"))
SIDES = ("train.de", "train.en")


def multi30k(settings: dict[str, Any]) -> list[list[list[int]]]:
    """Return the sentences of Multi30k as token ids of a joint vocabulary: [source, target]."""
    from xformer.text import read_lines
    from xformer.tokenizers import Tokenizer

    texts = [read_lines(DATA / name) for name in SIDES]
    tokenizer = Tokenizer.train(texts[0] + texts[1], settings["vocab_size"], lowercase=settings["lowercase"])
    return [tokenizer.encode_batch(lines) for lines in texts]


def synthetic(settings: dict[str, Any]) -> list[list[list[int]]]:
    """Return random token ids in sentences as long as those of Multi30k: 14 tokens on average."""
    import numpy as np

    rng = np.random.default_rng(0)
    common = rng.gamma(11.0, 1.2, 29_000)
    lengths = np.maximum(4, np.rint(common + rng.normal(0.8, 1.9, (2, len(common)))).astype(int))
    return [[rng.integers(4, settings["vocab_size"], n).tolist() for n in side] for side in lengths]


def make_workload(text: str, rounds: int) -> Workload:
    """Return the recipe's model with one random batch per round."""
    from xformer import Rng
    from xformer.data.pairs import TokenPairs, plan_batches

    recipe = tomllib.loads(RECIPE.read_text(encoding="utf-8"))
    training, size = recipe["training"], recipe["tokenizer"]["vocab_size"]
    source, target = {"multi30k": multi30k, "synthetic": synthetic}[text](recipe["tokenizer"])
    batches = plan_batches(TokenPairs(source, target), training["batch_tokens"], Rng(0))[:rounds]
    rows = {row: index for index, row in enumerate(row for batch in batches for row in batch)}
    model = TransformerConfig(
        **{**recipe["model"], **PLAIN, "share_embeddings": True, "tie_output": True},
        source_vocab_size=size,
        target_vocab_size=size,
    )
    settings = {
        "model": model.to_dict(),
        "source": [source[row] for row in rows],
        "target": [target[row] for row in rows],
        "batches": [[rows[row] for row in batch] for batch in batches],
        "label_smoothing": training["label_smoothing"],
        "max_grad_norm": 1.0,
    }
    tokens = [sum(len(target[row]) + 1 for row in batch) for batch in batches]
    return Workload(f"Multi30k recipe, {text} sentences", settings, tokens)


def reason_to_skip(text: str) -> str | None:
    """Return why the benchmark cannot run, or None."""
    if text == "multi30k" and not all((DATA / name).is_file() for name in SIDES):
        return f"no {' and '.join(SIDES)} in {DATA.name}/ next to the project; set XFORMER_MULTI30K"
    return None


@pytest.mark.parametrize("text", ["multi30k", "synthetic"])
def test_recipe(benchmark: Any, recorder: Recorder, text: str) -> None:
    if reason := reason_to_skip(text):
        pytest.skip(reason)
    specs = [
        *xformer_specs("workloads.training:build", ["numpy"]),
        baseline("torch", "baselines.torch_training:build"),
    ]
    recorder.measure(benchmark, "multi30k-recipe", make_workload(text, ROUNDS), specs, ROUNDS)
