"""`xformer demo`: train a small translator on made-up text and show what it learned."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from xformer.cli._console import make_console, program
from xformer.cli._options import BackendOption, open_backend
from xformer.cli._plots import save
from xformer.cli._training import train_job
from xformer.cli.train import ParallelTrainingJob
from xformer.errors import CheckpointError, ConfigError
from xformer.families.run_directory import RunDirectory
from xformer.pipelines import Translator, show_attention
from xformer.runs.evaluation import ValidationScore
from xformer.runs.recipe import Recipe
from xformer.text import DemoTask, copy_task, exact_match, numbers_task, reverse_task
from xformer.text import bleu as word_bleu
from xformer.training import Event, Validation
from xformer.training.interrupt import check_stop

HELP = """Train a small translator on made-up text and show what it learned, in about a minute on two cores.

\b
  xformer demo                   English number words to German, 90 seconds
  xformer demo --task reverse    sequences of symbols, reversed, 60 seconds
  xformer demo --task copy       sequences of symbols, copied, 60 seconds

German puts the units before the tens ("forty-two" is "zweiundvierzig"), so attention has to learn a crossing \
alignment; a plot of it is written to DIR (attention.png). DIR is a training run like any other: translate with it, \
or inspect it.
"""
PICTURE = "attention.png"
_SAMPLES = 6


def demo(
    task: Annotated[str, typer.Option(metavar="numbers|reverse|copy", help="Task to learn.")] = "numbers",
    seconds: Annotated[
        float | None, typer.Option(min=1.0, help="Maximum training time (default: 90 for numbers, 60 for the others).")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the text and of the model.")] = 0,
    out: Annotated[
        Path,
        typer.Option("--out", metavar="DIR", help="Directory of the run: new, empty, or an earlier demo, replaced."),
    ] = Path("xformer-demo"),
    backend: BackendOption = "numpy",
) -> int:
    """Train a small translator on made-up text and show what it learned."""
    if task not in DEMOS:
        raise ConfigError(f"--task is {task!r}; expected one of {', '.join(DEMOS)}")
    chosen, run = DEMOS[task], RunDirectory(out)
    earlier = earlier_demo(run)
    xp = open_backend(backend)
    text = chosen.task(seed=seed)
    recipe = chosen.recipe(text, seconds, seed)
    names = [f"the demo's {column}" for column in ("source", "target", "validation source", "validation target")]
    job = ParallelTrainingJob.make(recipe, text.train, text.valid, xp=xp, backend=backend, names=names)
    with run.lock() if earlier else contextlib.nullcontext():
        for path in earlier:
            path.unlink()
    run.start(job.config({"demo": task, "seed": seed}), job.tokenizers())

    console = make_console()
    console.print(f"task: {text.description}, for example {text.test.source[0]} -> {text.test.target[0]}")
    job.describe(console)
    score = ValidationScore(job.valid, job.tokenizer_pair, measure=_bleu, on_batch=check_stop)

    def stop_when_perfect(event: Event, loop: object) -> str | None:
        perfect = isinstance(event, Validation) and score.outputs == text.valid.target
        return "all validation outputs are correct" if perfect else None

    with run.lock():
        outcome = train_job(job, run, console, task=job.task(score), callbacks=[stop_when_perfect])
    console.print(f"ended after step {outcome.trainer.loop.step:,}: {outcome.reason}")
    if outcome.exit_code:
        console.print(f"the demo was interrupted; start it again with: {program()} demo --task {task}")
        return outcome.exit_code
    _show_result(chosen, text, Translator.from_pretrained(out, xp=xp), run, console)
    return 0


@dataclass(frozen=True)
class Demo:
    """A task and a recipe that learns it in `seconds`; `is_clear` selects source tokens for the attention plot."""

    task: Callable[..., DemoTask]
    seconds: float
    model: dict[str, Any]
    training: dict[str, Any]
    is_clear: Callable[[list[str]], bool]

    def recipe(self, task: DemoTask, seconds: float | None, seed: int) -> Recipe:
        """Return the recipe."""
        minutes = (self.seconds if seconds is None else seconds) / 60.0
        return Recipe.from_dict(
            {
                "model": self.model,
                "tokenizer": {"model": task.tokenizer_model, "vocab_size": task.vocab_size},
                "training": self.training | {"max_minutes": minutes, "seed": seed},
            },
            "the demo",
        )


def _shows_crossing(tokens: list[str]) -> bool:
    """Return whether tens and units are separate tokens at the end ("▁thirty-", "nine"), which German swaps."""
    return len(tokens) > 3 and tokens[-2].endswith("-")


_SMALL = {"d_model": 128, "num_heads": 4, "d_ff": 256, "num_encoder_layers": 2, "num_decoder_layers": 2, "dropout": 0.0}
_SHORT = {
    "batch_tokens": 1024,
    "schedule": "cosine",
    "learning_rate_factor": 0.3,
    "warmup_steps": 80,
    "max_steps": 400,
    "validate_every": 50,
}
_SHALLOW = {**_SMALL, "num_encoder_layers": 1, "num_decoder_layers": 1}
_SEQUENCES = {**_SHORT, "learning_rate_factor": 0.4, "max_steps": 500}
DEMOS = {
    "numbers": Demo(numbers_task, 90.0, _SMALL, _SHORT, _shows_crossing),
    "reverse": Demo(reverse_task, 60.0, _SHALLOW, _SEQUENCES, lambda tokens: len(tokens) == 8),
    "copy": Demo(copy_task, 60.0, _SHALLOW, _SEQUENCES, lambda tokens: len(tokens) == 8),
}


def earlier_demo(run: RunDirectory) -> list[Path]:
    """Return the files of an earlier demo, which may be replaced; none if the directory is new or empty.

    Raises:
        ConfigError: If the directory contains anything else.
    """
    if not run.path.exists() or (run.path.is_dir() and not any(run.path.iterdir())):
        return []
    demo_files = {run.config, run.model, run.last, run.log, run.path / PICTURE}
    demo_files |= {run.tokenizer(side) for side in ("joint", "source", "target")}
    try:
        is_demo = "demo" in run.read_config()["data"]
    except (CheckpointError, KeyError):
        is_demo = False
    files = set(run.path.iterdir()) if run.path.is_dir() else set()
    if not is_demo or not files <= demo_files:
        raise ConfigError(f"{run.path} contains other files than an earlier demo; choose another --out")
    # The configuration last: as long as it exists, the directory is recognized as a demo.
    return sorted(files, key=lambda path: path == run.config)


def _show_result(demo: Demo, task: DemoTask, translator: Translator, run: RunDirectory, console: Console) -> None:
    sources, references = task.test.source, task.test.target
    translations = translator(sources)
    exact = exact_match(translations, references)
    unit = "" if _has_words(references) else " (of characters, since each line is one word)"
    console.print(
        f"\n{len(sources):,} unseen sources: {exact:.1f} % exactly right, "
        f"BLEU {_bleu(translations, references):.1f}{unit}\n"
    )
    _show_samples(sources, translations, references, console)
    row = _row_to_draw(demo, translator, task, translations)
    attention = show_attention(translator, sources[row], translations[row])
    save(attention.plot(title=f"{sources[row]} → {translations[row]}"), run.path / PICTURE)
    console.print(f"\nattention while writing {translations[row]!r}: {run.path / PICTURE}")
    console.print(f"translate more: echo '{sources[row]}' | {program()} translate --model {run.path}")
    console.print(
        f"train on your own text, one sentence per line: {program()} train --source train.de --target train.en "
        "--valid-source val.de --valid-target val.en --out run"
    )


def _bleu(translations: list[str], references: list[str]) -> float:
    """Return the BLEU of words, or of characters if each line is a single word."""
    if not _has_words(references):
        translations, references = ([" ".join(line) for line in lines] for lines in (translations, references))
    return word_bleu(translations, references).value


def _has_words(references: list[str]) -> bool:
    return any(" " in reference for reference in references)


def _show_samples(sources: list[str], translations: list[str], references: list[str], console: Console) -> None:
    """Print a few translations, among them wrong ones if there are any."""
    right = [row for row in range(len(sources)) if translations[row] == references[row]]
    wrong = [row for row in range(len(sources)) if translations[row] != references[row]]
    num_wrong = min(len(wrong), max(2, _SAMPLES - len(right)))
    for row in right[: _SAMPLES - num_wrong]:
        console.print(f"  right  {sources[row]} → {translations[row]}", style="green")
    for row in wrong[:num_wrong]:
        console.print(f"  wrong  {sources[row]} → {translations[row]} (expected {references[row]})", style="red")


def _row_to_draw(demo: Demo, translator: Translator, task: DemoTask, translations: list[str]) -> int:
    """Return the row of the shortest source with a clear plot and a correct translation, or else of another one."""
    tokenizer = translator.tokenizers.source
    tokens = [tokenizer.tokens(ids) for ids in tokenizer.encode_batch(task.test.source)]

    def preference(row: int) -> tuple[bool, bool, int]:
        wrong = translations[row] != task.test.target[row]
        return wrong, not demo.is_clear(tokens[row]), len(tokens[row])

    return min(range(len(tokens)), key=preference)
