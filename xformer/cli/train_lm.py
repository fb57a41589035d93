"""`xformer train-lm`: from one long text to a model that writes more of it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from xformer.cli.train_options import (
    DATA,
    BackendOption,
    DtypeOption,
    MaxMinutesOption,
    MaxUpdatesOption,
    OutOption,
    PrecisionOption,
    RecipeOption,
    ResumeOption,
    SeedOption,
    file_option,
)
from xformer.errors import ConfigError

HELP = """Train a language model on plain text: a decoder-only Transformer that predicts each character, or token, \
from those before it.

Learns the vocabulary, trains with validation at intervals, and keeps in DIR the best model (model.safetensors), \
the last state (last.safetensors), the tokenizer, what the run was told (config.json) and log.jsonl. Everything is \
checked before anything is written. Ctrl-C stops cleanly; --resume goes on to the same bits.

\b
Tiny Shakespeare (input.txt, 1.1 million characters), two minutes on two CPU cores:
  xformer train-lm --text input.txt --out run \\
    --recipe docs/recipes/tinyshakespeare.toml
  xformer generate --model run --prompt "ROMEO:"
Your own text, half an hour unless told otherwise:
  xformer train-lm --text mine.txt --out run --max-minutes 20
Go on with a run that was stopped, and train it longer:
  xformer train-lm --out run --resume --max-minutes 60

The last tenth of the text is kept for validation (--valid-share), unless there is a text for it (--valid-text). \
The loss is in nats a token; perplexity is its exponential.

\b
A recipe has task = "language_modeling" and three tables; options on the command line win over it:
  \\[model]      d_model, num_heads, d_ff, num_layers, positions, dropout, ...
  \\[tokenizer]  model = "characters" | "bpe", vocab_size, ...
  \\[training]   context_length, batch_size, learning_rate, schedule, optimizer, ...

Threads: one for each core; XFORMER_NUM_THREADS=N takes N.
"""


def train_lm(
    out: OutOption,
    text: Annotated[Path | None, file_option("--text", "Training text, in UTF-8, line ends included.")] = None,
    valid_text: Annotated[Path | None, file_option("--valid-text", "Validation text.")] = None,
    valid_share: Annotated[
        float | None,
        typer.Option(
            help="Without --valid-text: how much of the text, at its end, is kept for validation (default: the "
            "recipe's, or 0.1).",
            rich_help_panel=DATA,
        ),
    ] = None,
    max_minutes: MaxMinutesOption = None,
    max_updates: MaxUpdatesOption = None,
    resume: ResumeOption = False,
    recipe: RecipeOption = None,
    seed: SeedOption = None,
    dtype: DtypeOption = None,
    precision: PrecisionOption = None,
    backend: BackendOption = None,
) -> int:
    """Train a language model on plain text, or go on with a run."""
    from xformer.cli.train_request import Request, start
    from xformer.cli.train_request import resume as resume_run
    from xformer.cli.training_text import TEXT

    if valid_text is not None and valid_share is not None:
        raise ConfigError("--valid-text and --valid-share are both given; expected one or the other: leave one out")
    limits = {"max_minutes": max_minutes, "max_updates": max_updates}
    numbers = {"dtype": dtype, "precision": precision}
    request = Request(
        work=TEXT,
        out=out,
        files={"text": text, "valid_text": valid_text},
        recipe=recipe,
        changes={"training": {**limits, **numbers, "seed": seed, "valid_share": valid_share}},
        backend=backend,
    )
    return resume_run(request) if resume else start(request)
