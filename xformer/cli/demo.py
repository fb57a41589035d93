"""`xformer demo`: train a small translator on made-up text and show what it learned."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from xformer.cli._console import program
from xformer.cli._options import BackendOption
from xformer.cli._plots import save
from xformer.cli._training import exit_code
from xformer.data.demo_tasks import DemoTask, copy_task, numbers_task, reverse_task
from xformer.errors import ConfigError
from xformer.families.run_directory import RunDirectory
from xformer.pipelines import Translator, show_attention
from xformer.runs.backend import open_backend
from xformer.runs.console import make_console
from xformer.runs.launch import train
from xformer.runs.recipe import Recipe
from xformer.text import bleu, exact_match
from xformer.training import Event, Start, Validation
from xformer.training.fit import TrainingLoop

HELP = """Train a small translator on made-up text and show what it learned, in about a minute on two cores.

\b
  xformer demo                   English number words to German, 90 seconds
  xformer demo --task reverse    sequences of symbols, reversed, 60 seconds
  xformer demo --task copy       sequences of symbols, copied, 60 seconds

German puts the units before the tens ("forty-two" is "zweiundvierzig"), so attention has to learn a crossing \
alignment; a plot of it is written to DIR (attention.png). DIR is a training run like any other: translate with it, \
or inspect it.
"""
PICTURE, MARK = "attention.png", "demo"
_SAMPLES = 6
_PERFECT = 99.99  # BLEU


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
    with run.lock() if earlier else contextlib.nullcontext():
        for path in earlier:
            path.rmdir() if path.is_dir() else path.unlink()

    def mark(event: Event, loop: TrainingLoop) -> str | None:
        """Mark the directory as a demo, which may be replaced, and stop when all outputs are right."""
        if isinstance(event, Start):
            (out / MARK).touch()
        perfect = isinstance(event, Validation) and event.score is not None and event.score > _PERFECT
        return "all validation outputs are correct" if perfect else None

    console = make_console()
    console.print(f"task: {text.description}, for example {text.test.source[0]} -> {text.test.target[0]}")
    trained = train(recipe, **text.texts, out=out, xp=xp, callbacks=[mark])
    if code := exit_code(trained):
        console.print(f"the demo was interrupted; start it again with: {program()} demo --task {task}")
        return code
    _show_result(chosen, text, trained.pipeline, run, console)
    return 0


@dataclass(frozen=True)
class Demo:
    """A task and a recipe that learns it in `seconds`.

    Attributes:
        bleu: Tokenizer of sacreBLEU: characters if each line is one word.
        is_clear: Selects source tokens for the attention plot.
    """

    task: Callable[..., DemoTask]
    seconds: float
    bleu: str
    model: dict[str, Any]
    training: dict[str, Any]
    is_clear: Callable[[list[str]], bool]

    def recipe(self, task: DemoTask, seconds: float | None, seed: int) -> Recipe:
        """Return the recipe."""
        minutes = (self.seconds if seconds is None else seconds) / 60.0
        settings = {"max_minutes": minutes, "seed": seed, "bleu_tokenize": self.bleu}
        tokenizer = {"model": task.tokenizer_model, "vocab_size": task.vocab_size}
        tables = {"model": self.model, "tokenizer": tokenizer, "training": self.training | settings}
        return Recipe.from_dict(tables, "the demo")


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
    "numbers": Demo(numbers_task, 90.0, "char", _SMALL, _SHORT, _shows_crossing),
    "reverse": Demo(reverse_task, 60.0, "13a", _SHALLOW, _SEQUENCES, lambda tokens: len(tokens) == 8),
    "copy": Demo(copy_task, 60.0, "13a", _SHALLOW, _SEQUENCES, lambda tokens: len(tokens) == 8),
}


def earlier_demo(run: RunDirectory) -> list[Path]:
    """Return the files of an earlier demo, which may be replaced; none if the directory is new or empty.

    Raises:
        ConfigError: If the directory contains anything else.
    """
    paths = {path.relative_to(run.path).as_posix(): path for path in run.path.rglob("*")}
    paths = {name: path for name, path in paths.items() if not name.startswith(".")}  # hidden files stay
    if not paths and not run.path.is_file():
        return []
    names = {"config.json", "model.safetensors", "last.safetensors", "log.jsonl", "tokenizer.json", PICTURE, MARK}
    names |= {"data", *(f"data/{name}" for name in ("source", "target", "valid_source", "valid_target"))}
    if MARK not in paths or not paths.keys() <= names:
        raise ConfigError(f"{run.path} contains other files than an earlier demo; choose another --out")
    # The mark last: as long as it exists, the directory is recognized as a demo.
    return sorted(paths.values(), key=lambda path: (path.name == MARK, -len(path.parts)))


def _show_result(demo: Demo, task: DemoTask, translator: Translator, run: RunDirectory, console: Any) -> None:
    sources, references = task.test.source, task.test.target
    translations = translator(sources)
    exact = exact_match(translations, references)
    unit = " (of characters, since each line is one word)" if demo.bleu == "char" else ""
    console.print(
        f"\n{len(sources):,} unseen sources: {exact:.1f} % exactly right, "
        f"BLEU {bleu(translations, references, tokenize=demo.bleu).value:.1f}{unit}\n"
    )
    _show_samples(sources, translations, references, console)
    row = _row_to_draw(demo, translator, task, translations)
    attention = show_attention(translator, sources[row], translations[row])
    save(attention.plot(title=f"{sources[row]} → {translations[row]}"), run.path / PICTURE)
    console.print(f"\nattention while writing {translations[row]!r}: {run.path / PICTURE}")
    console.print(f"explore it in the browser: {program()} serve --model {run.path}")
    console.print(f"translate more: echo '{sources[row]}' | {program()} translate --model {run.path}")
    python = f"xformer.Translator.from_pretrained({str(run.path)!r})([{sources[row]!r}])"
    console.print(f"the same from Python: {python}")
    console.print(
        f"train on your own text, one sentence per line: {program()} train --source train.de --target train.en "
        "--valid-source val.de --valid-target val.en --out run"
    )


def _show_samples(sources: list[str], translations: list[str], references: list[str], console: Any) -> None:
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
