"""Training speed on the batches of the Multi30k recipe, dropout and padding included, against torch eager.

    pytest bench/bench_recipe.py --benchmark-only -s

The model and the batches are those of docs/recipes/multi30k-de-en.toml; both sides work through the same random
batches and count the same target tokens. The text (train.de, train.en) is looked for in ../shared/data/multi30k, or
in the folder that XFORMER_MULTI30K names; without it, sentences of the same lengths stand in. It takes about two
minutes. A ratio above 1 says that xformer is faster. Needs torch; run it on a machine that does nothing else.
"""

from __future__ import annotations

import os
import tomllib
from pathlib import Path
from typing import Any

import pytest
from race import ROOT, Recorder, peer, xformer

from xformer import TransformerConfig
from xformer.benchmarks import Case

TURNS = 24
RECIPE = ROOT / "docs" / "recipes" / "multi30k-de-en.toml"
DATA = Path(os.environ.get("XFORMER_MULTI30K", ROOT.parent / "shared" / "data" / "multi30k"))
SIDES = ("train.de", "train.en")


def multi30k(settings: dict[str, Any]) -> list[list[list[int]]]:
    """The real sentences as tokens of a joint vocabulary: [source, target]."""
    from xformer.text import Tokenizer

    texts = [(DATA / name).read_text(encoding="utf-8").splitlines() for name in SIDES]
    tokenizer = Tokenizer.train(texts[0] + texts[1], settings["vocab_size"], lowercase=settings["lowercase"])
    return [tokenizer.encode_batch(lines) for lines in texts]


def synthetic(settings: dict[str, Any]) -> list[list[list[int]]]:
    """Random tokens in sentences as long as those of Multi30k: 14 on average, both sides of a pair alike."""
    import numpy as np

    rng = np.random.default_rng(0)
    common = rng.gamma(11.0, 1.2, 29_000)
    lengths = np.maximum(4, np.rint(common + rng.normal(0.8, 1.9, (2, len(common)))).astype(int))
    return [[rng.integers(4, settings["vocab_size"], n).tolist() for n in side] for side in lengths]


def make_case(kind: str, turns: int) -> Case:
    """The recipe's model on as many random batches as turns need, as its training makes them."""
    from xformer import Rng
    from xformer.data.pairs import TokenPairs, plan_batches

    recipe = tomllib.loads(RECIPE.read_text(encoding="utf-8"))
    training, size = recipe["training"], recipe["tokenizer"]["vocab_size"]
    source, target = {"multi30k": multi30k, "synthetic": synthetic}[kind](recipe["tokenizer"])
    batches = plan_batches(TokenPairs(source, target), training["batch_tokens"], Rng(0))[:turns]
    rows = {row: place for place, row in enumerate(row for batch in batches for row in batch)}
    model = TransformerConfig(
        **{**recipe["model"], "share_embeddings": True, "tie_output": True},
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
    return Case(f"Multi30k recipe, {kind} sentences", settings, tokens)


def reason_to_skip(kind: str) -> str | None:
    """Why this machine cannot run the benchmark, or None."""
    if kind == "multi30k" and not all((DATA / name).is_file() for name in SIDES):
        return f"no {' and '.join(SIDES)} in {DATA.name}/ next to the project; set XFORMER_MULTI30K"
    return None


@pytest.mark.parametrize("kind", ["multi30k", "synthetic"])
def test_recipe(benchmark: Any, recorder: Recorder, kind: str) -> None:
    if reason := reason_to_skip(kind):
        pytest.skip(reason)
    entries = [*xformer("xformer.benchmarks.training:work", ["numpy"]), peer("torch", "peers.torch_training:work")]
    recorder.race(benchmark, "multi30k-recipe", make_case(kind, TURNS), entries, TURNS)
