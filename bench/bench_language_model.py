"""Updates of the tiny Shakespeare recipe (nanoGPT's small setting for a CPU) against torch eager.

    pytest bench/bench_language_model.py --benchmark-only -s
    python bench/bench_language_model.py                        # all of the training in torch, with its curve

Model, batches and optimizer are those of docs/recipes/tinyshakespeare.toml; torch has nanoGPT's model with the same
parameters. The text (input.txt) is looked for in ../shared/data/tinyshakespeare, or in the folder that
XFORMER_TINYSHAKESPEARE names; without it, random characters stand in. Both sides work on all cores; xformer once with
a batch as a whole and once in a shard for each core. It takes about two minutes. A ratio above 1 says that xformer is
faster. Needs torch; run it on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import pytest
from peers import language_model
from race import ROOT, Recorder, peer

from xformer.benchmarks import Case, Entry, describe_machine

TURNS = 15
UPDATES = 25  # in a turn
DATA = Path(os.environ.get("XFORMER_TINYSHAKESPEARE", ROOT.parent / "shared" / "data" / "tinyshakespeare"))
RECIPE = ROOT / "docs" / "recipes" / "tinyshakespeare.toml"
SHARDS = (1, 2)


def texts() -> tuple[list[int], list[int], int]:
    """The training and the validation text as token ids, and the size of the vocabulary."""
    from xformer.cli.train_lm import split, train_tokenizer
    from xformer.text import read_text
    from xformer.training import Recipe

    if not (DATA / "input.txt").is_file():
        import numpy as np

        ids = np.random.default_rng(0).integers(4, 69, 100_000).tolist()
        return ids[10_000:], ids[:10_000], 69
    recipe = Recipe.from_toml(RECIPE)
    train, valid = split(read_text(DATA / "input.txt"), recipe.training.valid_share)
    tokenizer = train_tokenizer(train, recipe.tokenizer)
    return tokenizer.encode_text(train), tokenizer.encode_text(valid), tokenizer.vocab_size


def specification() -> tuple[dict[str, Any], list[int]]:
    """What contenders are told, and the validation text."""
    import dataclasses

    from xformer.models import LanguageModelConfig
    from xformer.training import Recipe

    recipe = Recipe.from_toml(RECIPE)
    train, valid, vocab_size = texts()
    training = dataclasses.asdict(recipe.training)
    spec = {
        "model": LanguageModelConfig(vocab_size=vocab_size, **recipe.model).to_dict(),
        "training": training,
        "text": train,
        "updates": UPDATES,
    }
    return spec, valid


@pytest.mark.parametrize("shards", SHARDS)
def test_language_model(benchmark: Any, recorder: Recorder, shards: int) -> None:
    spec, _ = specification()
    training = spec["training"]
    tokens = UPDATES * training["context_length"] * training["batch_size"]
    name = f"tiny Shakespeare, {UPDATES} updates, {shards} shard{'s' if shards > 1 else ''}"
    entries = [
        Entry("xformer numpy", "peers.language_model:ours", {"shards": shards}),
        peer("torch", "peers.language_model:theirs"),
    ]
    recorder.race(benchmark, "language-model", Case(name, spec, (tokens,)), entries, TURNS)


def train_torch() -> None:
    """Print torch's learning curve, with each of its AdamWs that a race may choose."""
    spec, valid = specification()
    print(describe_machine())
    for kind in ("foreach", "fused"):
        for update, total, validating, loss in language_model.torch_training(spec, valid, kind):
            print(
                f"torch, AdamW {kind}: update {update}  {total:.1f} s, validation {validating:.1f} s  loss {loss:.4f}"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    train_torch()


if __name__ == "__main__":
    main()
