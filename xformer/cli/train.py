"""`xformer train`: train a model on parallel text."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from xformer.cli._options import DATA, RECIPE, OutOption, config_options, file_option, launch_arguments
from xformer.cli._training import INIT_HELP, finish
from xformer.runs import launch
from xformer.runs.config import TokenizerConfig, TrainingConfig

HELP = f"""Train a translation model on parallel text: two files, line n of one translating line n of the other. With \
--task summarization, train a summarizer: documents, one per line, and their summaries.

Learns a vocabulary, trains, validates at regular intervals, and writes to DIR the best model (model.safetensors), the \
last state (last.safetensors), the tokenizers, the configuration (config.json) and log.jsonl. All input is checked \
before anything is written. The state is saved every few minutes and on Ctrl-C; `xformer resume DIR` continues from it.

\b
A first run of 25 minutes (30 by default):
  xformer train --source train.de --target train.en \\
    --valid-source val.de --valid-target val.en --out run --max-minutes 25
With a recipe, and two of its settings changed:
  xformer train --source train.de --target train.en \\
    --valid-source val.de --valid-target val.en --out run \\
    --recipe my.toml --seed 1 --set training.warmup_steps=4000
Fine-tune a public checkpoint:
  xformer train --source train.de --target train.en \\
    --valid-source val.de --valid-target val.en --init opus-mt-de-en --out run
Continue it, and train longer:
  xformer resume run --max-minutes 60

\b
A recipe has a task and three tables; options override it:
  \\[model]      d_model, num_heads, d_ff, num_encoder_layers, dropout, ...
  \\[tokenizer]  vocab_size, model = "bpe" | "words" | "characters", joint, ...
  \\[training]   batch_tokens, learning_rate_factor, warmup_steps, ...

Train with 8 processes, on one or more hosts:
  mpiexec -n 8 xformer train RECIPE-AND-FILES --out run --distributed mpi

{INIT_HELP}"""


@config_options(
    TrainingConfig,
    TokenizerConfig,
    names=[
        *("max_minutes", "max_steps", "learning_rate", "warmup_steps", "batch_tokens"),
        *("vocab_size", "lowercase", "max_length", "truncation"),
        "bleu_tokenize",
        *("seed", "dtype", "precision"),
    ],
    default_of="the recipe's",
)
def train(
    out: OutOption,
    source: Annotated[Path, file_option("--source", "Training text, source side.")],
    target: Annotated[Path, file_option("--target", "Training text, target side.")],
    valid_source: Annotated[Path, file_option("--valid-source", "Validation text, source side.")],
    valid_target: Annotated[Path, file_option("--valid-target", "Validation text, target side.")],
    source_language: Annotated[
        str | None, typer.Option(help="Language of the sources, for --init with many languages.", rich_help_panel=DATA)
    ] = None,
    target_language: Annotated[str | None, typer.Option(help="Language of the targets.", rich_help_panel=DATA)] = None,
    task: Annotated[
        str | None,
        typer.Option(
            metavar="translation|summarization",
            help="Task; for summarization the source is one document per line and the target its summary. "
            "\\[default: the recipe's, or translation]",
            rich_help_panel=RECIPE,
        ),
    ] = None,
    *,
    training: dict[str, Any],
    settings: dict[str, Any],
) -> int:
    """Train a model on parallel text."""
    languages = {"source_language": source_language, "target_language": target_language}
    run = launch.train(
        source=source,
        target=target,
        valid_source=valid_source,
        valid_target=valid_target,
        out=out,
        **launch_arguments(settings, training, task, **languages),
    )
    return finish(run)
