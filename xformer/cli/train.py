"""`xformer train`: from parallel text to a translator."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

HELP = """Train a translator on parallel text: two files, line n of one translating line n of the other. Or a \
summariser, with --task summarization: documents, one a line, and their summaries.

Learns the vocabulary, trains with validation at intervals, and keeps in DIR the best model (model.safetensors), \
the last state (last.safetensors), the tokenizers, what the run was told (config.json) and log.jsonl. Everything is \
checked before anything is written. Ctrl-C stops cleanly; --resume goes on to the same bits.

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
_DATA, _LENGTH, _SETTINGS, _COMPUTING = "Text", "How long", "Settings", "Computing"


def _file(option: str, what: str) -> Any:
    return typer.Option(option, metavar="FILE", help=what, rich_help_panel=_DATA)


def train(
    out: Annotated[
        Path, typer.Option("--out", metavar="DIR", help="Directory of the run: new or empty.", rich_help_panel=_DATA)
    ],
    source: Annotated[Path | None, _file("--source", "Training text, source side.")] = None,
    target: Annotated[Path | None, _file("--target", "Training text, target side.")] = None,
    valid_source: Annotated[Path | None, _file("--valid-source", "Validation text, source side.")] = None,
    valid_target: Annotated[Path | None, _file("--valid-target", "Validation text, target side.")] = None,
    max_minutes: Annotated[
        float | None,
        typer.Option(
            help="End after this many minutes of wall time, validation included, over all sittings "
            "(default: the recipe's; 30 when nothing else ends the run).",
            rich_help_panel=_LENGTH,
        ),
    ] = None,
    max_updates: Annotated[
        int | None,
        typer.Option(
            help="End after this many updates (default: the recipe's). The cosine schedule reaches zero there, so "
            "moving it changes later learning rates.",
            rich_help_panel=_LENGTH,
        ),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Go on with the run in DIR: same text, same settings; only its end may be moved.",
            rich_help_panel=_LENGTH,
        ),
    ] = False,
    recipe: Annotated[
        Path | None,
        typer.Option(metavar="FILE.toml", help="Settings of model, tokenizer, training.", rich_help_panel=_SETTINGS),
    ] = None,
    task: Annotated[
        str | None,
        typer.Option(
            metavar="translation|summarization",
            help="What to learn (default: the recipe's, or translation). For summarization the source is one document "
            "a line, the target its summary.",
            rich_help_panel=_SETTINGS,
        ),
    ] = None,
    vocab_size: Annotated[
        int | None,
        typer.Option(help="Most tokens of a vocabulary (default: the recipe's, or 8000).", rich_help_panel=_SETTINGS),
    ] = None,
    lowercase: Annotated[
        bool | None,
        typer.Option(
            "--lowercase/--no-lowercase",
            help="Lower-case all text; BLEU then ignores case (default: the recipe's, or no).",
            rich_help_panel=_SETTINGS,
        ),
    ] = None,
    max_length: Annotated[
        int | None,
        typer.Option(
            help="Most tokens of a sentence or document (default: the recipe's, or 256).", rich_help_panel=_SETTINGS
        ),
    ] = None,
    long_lines: Annotated[
        str | None,
        typer.Option(
            metavar="error|drop|cut",
            help="What to do with longer ones: refuse, leave the pair out, or cut the source (default: the recipe's; "
            "or error, and for summarization cut).",
            rich_help_panel=_SETTINGS,
        ),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(
            help="The same seed gives the same model, to the bit, on the same machine (default: the recipe's, or 0).",
            rich_help_panel=_SETTINGS,
        ),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            metavar="float32|float64",
            help="Of the model (default: the recipe's, or float32).",
            rich_help_panel=_COMPUTING,
        ),
    ] = None,
    backend: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Array library to compute with: numpy (default), cupy, torch, jax or array_api_strict.",
            rich_help_panel=_COMPUTING,
        ),
    ] = None,
) -> int:
    """Train a translator on parallel text, or go on with a run."""
    from xformer.cli.train_request import Request, go_on, start

    request = Request(
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
                "long_lines": long_lines,
                "seed": seed,
                "dtype": dtype,
            },
        },
        backend=backend,
    )
    return go_on(request) if resume else start(request)
