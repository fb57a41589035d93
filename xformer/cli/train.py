r"""`xformer train`: train a translator or a summarizer on parallel text.

Train a translation model on parallel text: two files, line n of one translating line n of the other. With --task
summarization, train a summarizer: documents, one per line, and their summaries.

Learns a vocabulary, trains, validates at regular intervals, and writes to DIR the best model (model.safetensors), the
last state (last.safetensors), the tokenizer, the configuration (config.json) and log.jsonl. All input is checked
before anything is written. The state is saved every few minutes and on Ctrl-C; `xformer resume DIR` continues from
it.

\b
A first run of 25 minutes (30 by default); the schedule ends with the time:
  xformer train --source train.de --target train.en \
    --valid-source val.de --valid-target val.en --out run --max-minutes 25
With a recipe, and two of its settings changed:
  xformer train --source train.de --target train.en \
    --valid-source val.de --valid-target val.en --out run \
    --recipe my.toml --seed 1 --set training.warmup_steps=4000
Fine-tune a public checkpoint:
  xformer train --source train.de --target train.en \
    --valid-source val.de --valid-target val.en --init opus-mt-de-en --out run
Continue it, and train longer:
  xformer resume run --max-minutes 60

\b
A recipe has a task and three tables; options override it:
  \[model]      d_model, num_heads, d_ff, num_encoder_layers, dropout, ...
  \[tokenizer]  vocab_size, model = "bpe" | "words" | "characters", joint, ...
  \[training]   batch_tokens, learning_rate_factor, warmup_steps, ...

\b
Train with 8 processes, on one or more hosts:
  mpiexec -n 8 xformer train RECIPE-AND-FILES --out run --distributed mpi

Without --valid-source and --valid-target, a tenth of the pairs, drawn at random and at most 1,000, is held out for
validation (--valid-share). Without --max-steps and --max-minutes, training ends after 30 minutes, or when 5 validations
in turn are no better (--patience).

With --init, training starts from a public checkpoint or a run, with its tokenizer. The learning rate is then 5e-5
unless set (5e-4 with --lora), warm-up takes at most a tenth of --max-steps, and \[model] has only dropout,
attention_dropout, activation_dropout and rematerialize. `xformer export DIR OUT` writes the tuned model in the
Hugging Face format.

Uses all cores; XFORMER_NUM_THREADS=N limits the number of threads.
"""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Annotated, Any

from xformer.cli._io import program, quote
from xformer.cli._options import OutOption, config_options, file_option, launch_arguments
from xformer.families.run_directory import COMMANDS, RunDirectory
from xformer.runs import launch
from xformer.runs.config import InitConfig, TokenizerConfig, TrainingConfig
from xformer.runs.console import make_console

TRAINING = ("valid_share", "max_minutes", "max_steps", "patience", "learning_rate", "warmup_steps")
COMPUTING = ("seed", "dtype", "precision", "reproducible")
_OPTIONS = [
    *("source_language", "target_language", "lora", "task"),
    *(*TRAINING, "batch_tokens", "vocab_size", "lowercase", "max_length", "truncation", "bleu_tokenize"),
    *COMPUTING,
]


@config_options(TrainingConfig, TokenizerConfig, InitConfig, names=_OPTIONS, default_of="the recipe's")
def train(
    out: OutOption,
    source: Annotated[Path, file_option("--source", "Training text, source side.")],
    target: Annotated[Path, file_option("--target", "Training text, target side.")],
    valid_source: Annotated[Path | None, file_option("--valid-source", "Validation text, source side.")] = None,
    valid_target: Annotated[Path | None, file_option("--valid-target", "Validation text, target side.")] = None,
    *,
    training: dict[str, Any],
    settings: dict[str, Any],
) -> int:
    """Train a model on parallel text."""
    texts: dict[str, Any] = {"source": source, "target": target}
    texts |= {"valid_source": valid_source, "valid_target": valid_target}
    return finish(launch.train(**texts, out=out, **launch_arguments(settings, training)))


def exit_code(run: launch.TrainedRun[Any]) -> int:
    """Return the exit code of a command that trained: after a signal, what a shell reports for one."""
    number = signal.Signals.__members__.get(run.reason.removeprefix("stopped by "))
    return 0 if number is None else 128 + number


def finish(run: launch.TrainedRun[Any]) -> int:
    """Print the next command, on rank 0, and return the exit code."""
    console, path = make_console(quiet=run.rank > 0), quote(run.directory)
    if code := exit_code(run):
        console.print(f"everything is saved; continue with: {program()} resume {path}")
        return code
    task = RunDirectory(run.directory).read_config()["task"]
    options = {"language_modeling": "", "chat": " --chat --prompt TEXT"}.get(task, " --input FILE --output FILE")
    console.print(f"next: {program()} {COMMANDS[task]} --model {path}{options}")
    return 0
