"""`xformer train`, `train-lm` and `resume`: train a model on parallel text, plain text or chats, and continue a run."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Annotated, Any

import typer

from xformer.cli._console import program, quote
from xformer.cli._options import (
    RECIPE,
    DistributedOption,
    LoggerOption,
    OptionalBackendOption,
    OutOption,
    config_options,
    file_option,
    launch_arguments,
)
from xformer.families.run_directory import COMMANDS, RunDirectory
from xformer.runs import launch
from xformer.runs.config import (
    BaseTrainingConfig,
    ChatTrainingConfig,
    InitConfig,
    LanguageModelTrainingConfig,
    TokenizerConfig,
    TrainingConfig,
)
from xformer.runs.console import make_console

_WRITES = """Learns a vocabulary, trains, validates at regular intervals, and writes to DIR the best model \
(model.safetensors), the last state (last.safetensors), the tokenizer, the configuration (config.json) and log.jsonl. \
All input is checked before anything is written. The state is saved every few minutes and on Ctrl-C; \
`xformer resume DIR` continues from it."""
_INIT = """With --init, training starts from a public checkpoint or a run, with its tokenizer. The learning rate \
is then 5e-5 unless set (5e-4 with --lora), warm-up takes at most a tenth of --max-steps, and \\[model] has only \
dropout, attention_dropout, activation_dropout and rematerialize. `xformer export DIR OUT` writes the tuned model \
in the Hugging Face format.

Uses all cores; XFORMER_NUM_THREADS=N limits the number of threads.
"""
HELP = f"""Train a translation model on parallel text: two files, line n of one translating line n of the other. With \
--task summarization, train a summarizer: documents, one per line, and their summaries.

{_WRITES}

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

{_INIT}"""

TRAIN_LM_HELP = f"""Train a language model on plain text: a decoder-only Transformer that predicts each character, or \
token, from those before it. Or fine-tune a model that answers chats.

{_WRITES}

\b
Tiny Shakespeare (input.txt, 1.1 million characters), two minutes on two CPU cores:
  xformer train-lm --text input.txt --out run \\
    --recipe docs/recipes/tinyshakespeare.toml
  xformer generate --model run --prompt "ROMEO:"
A text of your own, for 20 minutes (30 by default):
  xformer train-lm --text mine.txt --out run --max-minutes 20
Fine-tune a public checkpoint:
  xformer train-lm --text mine.txt --init SmolLM2-135M --out run
  xformer train-lm --text mine.txt --init SmolLM2-135M --lora 8 --out run
On chats, one JSON object per line ({{"messages": [{{"role": "user", "content": "..."}}, ...]}}):
  xformer train-lm --chats chats.jsonl --init SmolLM2-135M-Instruct --lora 8 --out run
  xformer generate --model run --chat --prompt "Hello"
Continue it, and train longer:
  xformer resume run --max-minutes 60

The last tenth of the text or the chats is held out for validation (--valid-share), unless --valid-text or \
--valid-chats names other ones. The loss is in nats per token; perplexity is its exponential. With chats it is that of \
the answers of the assistant. Several conversations share a row of --context-length tokens (1024 by default), without \
seeing each other, and a batch has 4 rows.

\b
A recipe has task = "language_modeling" (or "chat") and three tables; options override it:
  \\[model]      d_model, num_heads, d_ff, num_layers, positions, dropout, ...
  \\[tokenizer]  model = "characters" | "bpe", vocab_size, ...
  \\[training]   context_length, batch_size, learning_rate, schedule, optimizer, ...

{_INIT}"""

RESUME_HELP = """Continue a training run that was stopped or interrupted, or train a finished one longer.

Recipe and data files are read from the run; the data must not have changed, but may be in another directory \
(--data). A resumed run matches an uninterrupted one exactly, on the same backend and machine.

\b
Continue           xformer resume run
Train longer       xformer resume run --max-minutes 60
The data has moved xformer resume run --data corpora
"""

_TRAINING = ["max_minutes", "max_steps", "learning_rate", "warmup_steps"]
_COMPUTING = ["seed", "dtype", "precision"]


@config_options(
    TrainingConfig,
    TokenizerConfig,
    InitConfig,
    names=[
        *("source_language", "target_language", "lora"),
        *(*_TRAINING, "batch_tokens", "vocab_size", "lowercase", "max_length", "truncation", "bleu_tokenize"),
        *_COMPUTING,
    ],
    default_of="the recipe's",
)
def train(
    out: OutOption,
    source: Annotated[Path, file_option("--source", "Training text, source side.")],
    target: Annotated[Path, file_option("--target", "Training text, target side.")],
    valid_source: Annotated[Path, file_option("--valid-source", "Validation text, source side.")],
    valid_target: Annotated[Path, file_option("--valid-target", "Validation text, target side.")],
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
    texts: dict[str, Any] = {"source": source, "target": target}
    texts |= {"valid_source": valid_source, "valid_target": valid_target}
    settings |= {"task": task} if task else {}
    return finish(launch.train(**texts, out=out, **launch_arguments(settings, training)))


@config_options(
    LanguageModelTrainingConfig,
    InitConfig,
    names=["lora", "valid_share", "context_length", "batch_size", "truncation", *_TRAINING, *_COMPUTING],
    default_of="the recipe's",
    variants={"with --chats": ChatTrainingConfig},
)
def train_lm(
    out: OutOption,
    text: Annotated[Path | None, file_option("--text", "Training text, used with its line ends.")] = None,
    valid_text: Annotated[Path | None, file_option("--valid-text", "Validation text.")] = None,
    chats: Annotated[Path | None, file_option("--chats", "Conversations, one JSON object per line.")] = None,
    valid_chats: Annotated[Path | None, file_option("--valid-chats", "Conversations for validation.")] = None,
    *,
    training: dict[str, Any],
    settings: dict[str, Any],
) -> int:
    """Train a language model on plain text or chats."""
    texts: dict[str, Any] = {"text": text, "valid_text": valid_text, "chats": chats, "valid_chats": valid_chats}
    return finish(launch.train_lm(**texts, out=out, **launch_arguments(settings, training)))


@config_options(BaseTrainingConfig, names=["max_minutes", "max_steps"], default_of="the run's")
def resume(
    directory: Annotated[Path, typer.Argument(metavar="RUN", help="Directory of the run.", show_default=False)],
    settings: dict[str, Any],
    moved_to: Annotated[
        Path | None, typer.Option("--data", metavar="DIR", help="Directory of the data files, if they were moved.")
    ] = None,
    backend: OptionalBackendOption = None,
    logger: LoggerOption = None,
    distributed: DistributedOption = None,
) -> int:
    """Continue a training run."""
    options: dict[str, Any] = {"loggers": logger or None, "distributed": distributed}
    return finish(launch.resume(directory, data=moved_to, xp=backend, **options, **settings))


def exit_code(run: launch.TrainedRun) -> int:
    """Return the exit code of a command that trained: after a signal, what a shell reports for one."""
    number = signal.Signals.__members__.get(run.reason.removeprefix("stopped by "))
    return 0 if number is None else 128 + number


def finish(run: launch.TrainedRun) -> int:
    """Print the next command, on rank 0, and return the exit code."""
    console, path = make_console(quiet=run.rank > 0), quote(run.directory)
    if code := exit_code(run):
        console.print(f"everything is saved; continue with: {program()} resume {path}")
        return code
    task = RunDirectory(run.directory).read_config()["task"]
    options = {"language_modeling": "", "chat": " --chat --prompt TEXT"}.get(task, " --input FILE --output FILE")
    console.print(f"next: {program()} {COMMANDS[task]} --model {path}{options}")
    return 0
