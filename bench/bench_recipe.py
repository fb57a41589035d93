"""Training speed on the batches of the Multi30k recipe, dropout and padding included, against torch eager.

    pytest bench/bench_recipe.py --benchmark-only -s            # or, for the table alone:
    python bench/bench_recipe.py [--turns N]

The model and the batches are those of docs/recipes/multi30k-de-en.toml; both sides work through the same random
batches and count the same target tokens. The text (train.de, train.en) is looked for in ../shared/data/multi30k, or
in the folder that XFORMER_MULTI30K names; without it, sentences of the same lengths stand in. It takes about two
minutes. A ratio above 1 says that xformer is faster. Needs torch; run it on a machine that does nothing else.
"""

from __future__ import annotations

import os
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import race

TURNS = 24
RECIPE = race.ROOT / "docs" / "recipes" / "multi30k-de-en.toml"
DATA = Path(os.environ.get("XFORMER_MULTI30K", race.ROOT.parent / "shared" / "data" / "multi30k"))
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


def specification(kind: str, turns: int) -> dict[str, Any]:
    """The recipe's model on as many random batches as turns need, as its training makes them."""
    from xformer import Rng
    from xformer.training.batches import TokenPairs, plan_batches

    recipe = tomllib.loads(RECIPE.read_text(encoding="utf-8"))
    training, size = recipe["training"], recipe["tokenizer"]["vocab_size"]
    source, target = {"multi30k": multi30k, "synthetic": synthetic}[kind](recipe["tokenizer"])
    batches = plan_batches(TokenPairs(source, target), training["batch_tokens"], Rng(0))[: turns + 3]
    rows = {row: place for place, row in enumerate(row for batch in batches for row in batch)}
    sizes = {"source_vocab_size": size, "target_vocab_size": size}
    return {
        "model": {**recipe["model"], **sizes, "share_embeddings": True, "tie_output": True},
        "source": [source[row] for row in rows],
        "target": [target[row] for row in rows],
        "batches": [[rows[row] for row in batch] for batch in batches],
        "label_smoothing": training["label_smoothing"],
        "max_norm": 1.0,
    }


def reason_to_skip(kind: str) -> str | None:
    """Why this machine cannot run the benchmark, or None."""
    if kind == "multi30k" and not all((DATA / name).is_file() for name in SIDES):
        return f"no {' and '.join(SIDES)} in {DATA.name}/ next to the project; set XFORMER_MULTI30K"
    return None


@pytest.mark.parametrize("kind", ["multi30k", "synthetic"])
def test_recipe(benchmark: Any, kind: str) -> None:
    pytest.importorskip("torch", reason="the comparison needs torch")
    if reason := reason_to_skip(kind):
        pytest.skip(reason)
    race.run(benchmark, specification(kind, TURNS), TURNS)


def main() -> None:
    turns = race.turns(__doc__, TURNS)
    found = {}
    for kind in ("multi30k", "synthetic"):
        if reason := reason_to_skip(kind):
            print(f"{kind}: {reason}")
            continue
        with race.race(specification(kind, turns)) as running:
            for _ in range(turns):
                running.turn()
            found[kind] = running.summary()
    print(race.machine(), race.table(found), sep="\n")


if __name__ == "__main__":
    main()
