r"""`xformer demo`: train a small translator on made-up text and show what it learned.

Train a small translator of English number words to German and show what it learned, within 90 seconds on
two cores.

\b
  xformer demo                 for at most 90 seconds
  xformer demo --seconds 30    for a first look

German puts the units before the tens ("forty-two" is "zweiundvierzig"), so attention has to learn a crossing
alignment; a plot of it is written to DIR (attention.png). DIR is a training run like any other: translate with it,
or inspect it.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Annotated, Any

import typer

from xformer.cli._io import program
from xformer.cli._options import CommonOptions, config_options, value_option
from xformer.cli._plots import save
from xformer.cli.train import exit_code
from xformer.data.demo_tasks import DemoTask, numbers_task
from xformer.errors import ConfigError
from xformer.families.run_directory import RunDirectory
from xformer.pipelines import show_attention
from xformer.runs.backend import open_backend
from xformer.runs.console import make_console
from xformer.runs.launch import train
from xformer.runs.recipe import Recipe, make_recipe
from xformer.text import bleu, exact_match
from xformer.training import Event, Start, Validation
from xformer.training.fit import TrainingLoop

PICTURE, MARK = "attention.png", "demo"
_SAMPLES = 6
_PERFECT = 99.99  # BLEU
_OUT_HELP = "Directory of the run: new, empty, or an earlier demo, replaced."
RECIPE = Path(__file__).with_name("demo.toml")


@config_options(CommonOptions, names=["backend"])
def demo(
    seconds: Annotated[float, typer.Option(min=1.0, help="Maximum training time.")] = 90.0,
    seed: Annotated[int, typer.Option(help="Seed of the text and of the model.")] = 0,
    out: Annotated[Path, value_option("--out", "DIR", _OUT_HELP, None)] = Path("xformer-demo"),
    *,
    settings: dict[str, Any],
) -> int:
    """Train a small translator on made-up text and show what it learned."""
    run = RunDirectory(out)
    earlier = earlier_demo(run)
    xp = open_backend(settings.get("backend", "numpy"))
    task, recipe = numbers_task(seed=seed), demo_recipe(seconds, seed)
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
    console.print(f"task: {task.description}, for example {task.test.source[0]} -> {task.test.target[0]}")
    trained = train(recipe, **task.texts, out=out, xp=xp, callbacks=[mark])
    if code := exit_code(trained):
        console.print(f"the demo was interrupted; start it again with: {program()} demo")
        return code
    _show_result(task, trained.pipeline, run, console)
    return 0


def demo_recipe(seconds: float, seed: int) -> Recipe:
    """Return the recipe of a translator that learns the task in less than 90 seconds."""
    return make_recipe(RECIPE, {"max_minutes": seconds / 60.0, "seed": seed}, ["translation"])


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


def _show_result(task: DemoTask, translator: Any, run: RunDirectory, console: Any) -> None:
    sources, references = task.test.source, task.test.target
    translations = translator(sources)
    exact = exact_match(translations, references)
    console.print(
        f"\n{len(sources):,} unseen sources: {exact:.1f} % exactly right, "
        f"BLEU {bleu(translations, references, tokenize='char').value:.1f} "
        "(of characters, since each line is one word)\n"
    )
    _show_samples(sources, translations, references, console)
    row = _row_to_draw(sources, references, translations)
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
    rows = list(zip(sources, translations, references, strict=True))
    right, wrong = ([row for row in rows if (row[1] == row[2]) == is_right] for is_right in (True, False))
    num_wrong = min(len(wrong), max(2, _SAMPLES - len(right)))
    for source, translation, _ in right[: _SAMPLES - num_wrong]:
        console.print(f"  right  {source} → {translation}", style="green")
    for source, translation, reference in wrong[:num_wrong]:
        console.print(f"  wrong  {source} → {translation} (expected {reference})", style="red")


def _row_to_draw(sources: list[str], references: list[str], translations: list[str]) -> int:
    """Return the row of the shortest source that ends with tens and units, which German swaps, correct if possible."""

    def preference(row: int) -> tuple[bool, bool, int]:
        *before, last = sources[row].split()
        return translations[row] != references[row], not before or "-" not in last, len(sources[row])

    return min(range(len(sources)), key=preference)
