"""The demo: a made-up task, a small recipe, the same training as `train`, and a look at the result."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from xformer.backends import to_host
from xformer.cli.backend import open_backend
from xformer.cli.console import make_console, program
from xformer.cli.plots import draw_attention
from xformer.cli.training import train_run
from xformer.cli.training_pairs import PreparedPairs
from xformer.errors import CheckpointError, ConfigError
from xformer.pipelines import Translator, ValidationScore
from xformer.text import DemoTask, copy_task, exact_match, numbers_task, reverse_task
from xformer.text import bleu as word_bleu
from xformer.training import Recipe, RunDirectory

PICTURE = "attention.png"
_SAMPLES = 6


@dataclass(frozen=True)
class Demo:
    """A task and what learns it in the time. picture: whether the attention map of such source tokens is clear."""

    task: Callable[..., DemoTask]
    seconds: float
    model: dict[str, Any]
    training: dict[str, Any]
    picture: Callable[[list[str]], bool]

    def recipe(self, task: DemoTask, seconds: float | None, seed: int) -> Recipe:
        """The recipe for a task that was made."""
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
    """Whether tens and units are apart at the end, "▁thirty-", "nine", so that one sees them change places."""
    return len(tokens) > 3 and tokens[-2].endswith("-")


_SMALL = {
    "d_model": 128,
    "num_heads": 4,
    "d_ff": 256,
    "num_encoder_layers": 2,
    "num_decoder_layers": 2,
    "dropout": 0.0,
}
_SHORT = {
    "batch_tokens": 1024,
    "schedule": "cosine",
    "learning_rate_factor": 0.3,
    "warmup_steps": 80,
    "max_updates": 400,
    "validate_every": 50,
}
_SHALLOW = {**_SMALL, "num_encoder_layers": 1, "num_decoder_layers": 1}
_SEQUENCES = {**_SHORT, "learning_rate_factor": 0.4, "max_updates": 500}
DEMOS = {
    "numbers": Demo(numbers_task, 90.0, _SMALL, _SHORT, _shows_crossing),
    "reverse": Demo(reverse_task, 60.0, _SHALLOW, _SEQUENCES, lambda tokens: len(tokens) == 8),
    "copy": Demo(copy_task, 60.0, _SHALLOW, _SEQUENCES, lambda tokens: len(tokens) == 8),
}


def run_demo(name: str, *, seconds: float | None, seed: int, out: Path, backend: str) -> int:
    """Make the task, train, and show the result; returns the exit code."""
    if name not in DEMOS:
        raise ConfigError(f"--task is {name!r}; expected one of: {', '.join(DEMOS)}")
    demo, run = DEMOS[name], RunDirectory(out)
    earlier = earlier_demo(run)
    xp = open_backend(backend)
    task = demo.task(seed=seed)
    recipe = demo.recipe(task, seconds, seed)
    names = [f"the demo's {part}" for part in ("source", "target", "validation source", "validation target")]
    prepared = PreparedPairs.make(recipe, task.train, task.valid, xp=xp, backend=backend, names=names)
    with run.lock() if earlier else contextlib.nullcontext():
        for path in earlier:
            path.unlink()
    run.start(prepared.config("demo", {"task": name, "seed": seed}), prepared.tokenizers())

    console = make_console()
    console.print(f"task: {task.description}, for example {task.test.source[0]} -> {task.test.target[0]}")
    prepared.describe(console)
    score = ValidationScore(prepared.valid, prepared.sides, measure=_bleu)
    perfect = task.valid.target
    with run.lock():
        outcome = train_run(
            prepared, run, console, task=prepared.task(score), enough=lambda _: score.outputs == perfect
        )
    console.print(f"ended after update {outcome.trainer.progress.step:,}: {outcome.reason}")
    if outcome.code:
        console.print(f"the demo is not finished; start it again with: {program()} demo --task {name}")
        return outcome.code
    _show_result(demo, task, Translator.from_pretrained(out, xp=xp), run, console)
    return 0


def earlier_demo(run: RunDirectory) -> list[Path]:
    """The files of an earlier demo in a directory, which may be replaced; none when it is new or empty.

    Raises ConfigError when the directory holds anything else: it is the user's.
    """
    if not run.path.exists() or (run.path.is_dir() and not any(run.path.iterdir())):
        return []
    ours = {run.config, run.model, run.last, run.log, run.path / PICTURE}
    ours |= {run.tokenizer(side) for side in ("joint", "source", "target")}
    try:
        kind = run.read_config().get("kind")
    except CheckpointError:
        kind = None
    present = set(run.path.iterdir()) if run.path.is_dir() else set()
    if kind != "demo" or not present <= ours:
        raise ConfigError(f"{run.path} holds something else than an earlier demo; choose another --out")
    # The configuration last: while it is there, the directory is known as a demo.
    return sorted(present, key=lambda path: path == run.config)


def _show_result(demo: Demo, task: DemoTask, translator: Translator, run: RunDirectory, console: Console) -> None:
    sources, references = task.test.source, task.test.target
    translations = translator(sources)
    exact = exact_match(translations, references)
    unit = "" if _has_words(references) else " (of characters: a line is one word)"
    console.print(
        f"\n{len(sources):,} sources that were never in training: {exact:.1f} % exactly right, "
        f"BLEU {_bleu(translations, references):.1f}{unit}\n"
    )
    _show_samples(sources, translations, references, console)
    row = _row_to_draw(demo, translator, task, translations)
    weights, labels = _attention(translator, sources[row], translations[row])
    draw_attention(weights, *labels, f"{sources[row]} → {translations[row]}", run.path / PICTURE)
    console.print(f"\nwhere the model looked as it wrote {translations[row]!r}: {run.path / PICTURE}")
    console.print(f"translate more: echo '{sources[row]}' | {program()} translate --model {run.path}")
    console.print(
        f"train on your own text, one sentence a line: {program()} train --source train.de --target train.en "
        "--valid-source val.de --valid-target val.en --out run"
    )


def _bleu(translations: list[str], references: list[str]) -> float:
    """BLEU of words, or of characters where a line is one word and has no n-grams of words."""
    if not _has_words(references):
        translations, references = ([" ".join(line) for line in lines] for lines in (translations, references))
    return word_bleu(translations, references).value


def _has_words(references: list[str]) -> bool:
    return any(" " in reference for reference in references)


def _show_samples(sources: list[str], translations: list[str], references: list[str], console: Console) -> None:
    """Print a few translations, wrong ones too where there are any."""
    right = [row for row in range(len(sources)) if translations[row] == references[row]]
    wrong = [row for row in range(len(sources)) if translations[row] != references[row]]
    num_wrong = min(len(wrong), max(2, _SAMPLES - len(right)))
    for row in right[: _SAMPLES - num_wrong]:
        console.print(f"  right  {sources[row]} → {translations[row]}", style="green")
    for row in wrong[:num_wrong]:
        console.print(f"  wrong  {sources[row]} → {translations[row]} (expected {references[row]})", style="red")


def _row_to_draw(demo: Demo, translator: Translator, task: DemoTask, translations: list[str]) -> int:
    """The shortest source worth a look that was translated rightly; any other if there is none."""
    tokenizer = translator.tokenizers.source
    tokens = [tokenizer.tokens(ids) for ids in tokenizer.encode_batch(task.test.source)]

    def preference(row: int) -> tuple[bool, bool, int]:
        wrong = translations[row] != task.test.target[row]
        return wrong, not demo.picture(tokens[row]), len(tokens[row])

    return min(range(len(tokens)), key=preference)


def _attention(translator: Translator, source: str, translation: str) -> tuple[Any, tuple[list[str], list[str]]]:
    """Cross-attention of the last layer, averaged over its heads, with the labels of its columns and rows.

    A row is named by the token that was written from it, which is one later than the decoder's input.
    """
    config = translator.model.config
    source_ids = [*translator.tokenizers.source.encode(source), config.eos_id]
    target_ids = translator.tokenizers.target.encode(translation)
    layers = translator.model.cross_attention_weights([source_ids], [[config.bos_id, *target_ids]])
    weights = to_host(layers[-1])[0].mean(axis=0)
    written = [*target_ids, config.eos_id]
    return weights, (translator.tokenizers.source.tokens(source_ids), translator.tokenizers.target.tokens(written))
