"""`xformer train`: from parallel text to a translator."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from xformer.cli.train_options import (
    SETTINGS,
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

HELP = """Train a translator on parallel text: two files, line n of one translating line n of the other. Or a \
summarizer, with --task summarization: documents, one a line, and their summaries.

Learns the vocabulary, trains with validation at intervals, and keeps in DIR the best model (model.safetensors), \
the last state (last.safetensors), the tokenizers, what the run was told (config.json) and log.jsonl. Everything is \
checked before anything is written. The state is saved every few minutes, and Ctrl-C stops cleanly; --resume goes on \
to the same bits.

\b
A first run, half an hour unless told otherwise:
  xformer train --source train.de --target train.en \\
    --valid-source val.de --valid-target val.en --out run --max-minutes 25
All settings from a file, with one changed:
  xformer train --source train.de --target train.en \\
    --valid-source val.de --valid-target val.en --out run \\
    --recipe my.toml --seed 1
Go on with a run that was stopped, and train it longer:
  xformer train --out run --resume --max-minutes 60

\b
A recipe has three tables (and task = "..." before them); options on the command line win over it:
  \\[model]      d_model, num_heads, d_ff, num_encoder_layers, dropout, ...
  \\[tokenizer]  vocab_size, model = "bpe" | "words" | "characters", joint, ...
  \\[training]   batch_tokens, learning_rate_factor, warmup_steps, ...

Threads: one for each core; XFORMER_NUM_THREADS=N takes N.
"""


def train(
    out: OutOption,
    source: Annotated[Path | None, file_option("--source", "Training text, source side.")] = None,
    target: Annotated[Path | None, file_option("--target", "Training text, target side.")] = None,
    valid_source: Annotated[Path | None, file_option("--valid-source", "Validation text, source side.")] = None,
    valid_target: Annotated[Path | None, file_option("--valid-target", "Validation text, target side.")] = None,
    max_minutes: MaxMinutesOption = None,
    max_updates: MaxUpdatesOption = None,
    resume: ResumeOption = False,
    recipe: RecipeOption = None,
    task: Annotated[
        str | None,
        typer.Option(
            metavar="translation|summarization",
            help="What to learn (default: the recipe's, or translation). For summarization the source is one document "
            "a line, the target its summary.",
            rich_help_panel=SETTINGS,
        ),
    ] = None,
    vocab_size: Annotated[
        int | None,
        typer.Option(help="Most tokens of a vocabulary (default: the recipe's, or 8000).", rich_help_panel=SETTINGS),
    ] = None,
    lowercase: Annotated[
        bool | None,
        typer.Option(
            "--lowercase/--no-lowercase",
            help="Lower-case all text; BLEU then ignores case (default: the recipe's, or no).",
            rich_help_panel=SETTINGS,
        ),
    ] = None,
    max_length: Annotated[
        int | None,
        typer.Option(
            help="Most tokens of a sentence or document (default: the recipe's, or 256).", rich_help_panel=SETTINGS
        ),
    ] = None,
    truncation: Annotated[
        str | None,
        typer.Option(
            metavar="error|drop|cut",
            help="What to do with longer ones: refuse, leave the pair out, or cut the source (default: the recipe's; "
            "or error, and for summarization cut).",
            rich_help_panel=SETTINGS,
        ),
    ] = None,
    seed: SeedOption = None,
    dtype: DtypeOption = None,
    precision: PrecisionOption = None,
    backend: BackendOption = None,
) -> int:
    """Train a translator on parallel text, or go on with a run."""
    from xformer.cli.train_request import Request, start
    from xformer.cli.train_request import resume as resume_run
    from xformer.cli.training_pairs import PAIRS

    request = Request(
        work=PAIRS,
        out=out,
        files={"source": source, "target": target, "valid_source": valid_source, "valid_target": valid_target},
        recipe=recipe,
        changes={
            "task": task,
            "tokenizer": {"vocab_size": vocab_size, "lowercase": lowercase},
            "training": {
                "max_minutes": max_minutes,
                "max_updates": max_updates,
                "max_length": max_length,
                "truncation": truncation,
                "seed": seed,
                "dtype": dtype,
                "precision": precision,
            },
        },
        backend=backend,
    )
    return resume_run(request) if resume else start(request)
