"""What the commands of training share: a run from text in memory to a trained model on disk."""

from __future__ import annotations

import shlex
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from rich.console import Console

import xformer
from xformer.cli.console import plural, program, short
from xformer.cli.progress import TrainingProgress
from xformer.text import Tokenizer
from xformer.training import Recipe, RunDirectory, Task, Trainer, Validation

# What a signal that ended training leaves as the exit code, as a shell counts it.
_SIGNALS = {"stopped by SIGHUP": 129, "stopped by SIGINT": 130, "stopped by SIGTERM": 143}
# By task: the commands that train the model and that use it.
_COMMANDS = {
    "translation": ("train", "translate --model {run} --input FILE --output FILE"),
    "summarization": ("train", "summarize --model {run} --input FILE --output FILE"),
    "language_modeling": ("train-lm", "generate --model {run}"),
}


def command_for(task: str) -> str:
    """The command that trains a model for a task."""
    return _COMMANDS[task][0]


@dataclass(frozen=True)
class Prepared(ABC):
    """Everything that training needs, checked, before anything is written. recipe: with the number of shards."""

    recipe: Recipe
    model: Any
    backend: str

    @abstractmethod
    def task(self) -> Task:
        """What a trainer is told about the work."""

    @abstractmethod
    def tokenizers(self) -> dict[str, Tokenizer]:
        """The tokenizers, under the names that a run directory keeps them by."""

    @abstractmethod
    def counts(self) -> dict[str, int]:
        """How much text there is."""

    @abstractmethod
    def text_lines(self) -> Iterator[str]:
        """Say how much text there is, in words."""

    @abstractmethod
    def vocabulary(self) -> str:
        """Say how large the vocabulary is, in words."""

    @property
    @abstractmethod
    def unit(self) -> str:
        """What speed is counted in."""

    def config(self, kind: str, data: dict[str, Any]) -> dict[str, Any]:
        """What the run directory keeps about the run, as JSON. kind: the command; data: where the text came from."""
        return {
            "kind": kind,
            "task": self.recipe.task,
            "xformer": xformer.__version__,
            "backend": self.backend,
            "seed": self.recipe.training.seed,
            "recipe": self.recipe.to_dict(),
            "model": self.model.config.to_dict(),
            "num_parameters": self.model.parameter_count(),
            "data": data,
            "counts": self.counts(),
        }

    def describe(self, console: Console) -> None:
        """Say in three lines what is about to be trained on what."""
        for line in self.text_lines():
            console.print(line)
        settings = self.recipe.training
        mixed = settings.precision != "float32"
        numbers = f"{settings.dtype} computed in {settings.precision}" if mixed else settings.dtype
        console.print(
            f"model: {plural(self.model.parameter_count(), 'parameter')}, {self.vocabulary()} tokens; "
            f"{self.backend}, {numbers}, {plural(settings.shards, 'shard')}, seed {settings.seed}"
        )


@dataclass(frozen=True)
class Outcome:
    """How a training ended. code: the exit code."""

    trainer: Trainer
    reason: str
    code: int


def train_run(
    prepared: Prepared,
    run: RunDirectory,
    console: Console,
    *,
    resume: bool = False,
    task: Task | None = None,
    enough: Callable[[Validation], bool] = lambda validation: False,
) -> Outcome:
    """Train in a directory that was started, showing progress; returns how it ended.

    resume: go on from the directory's last state, or from the beginning where there is none yet. task: in place of
    the one that was prepared.
    """
    settings = prepared.recipe.training
    trainer = Trainer(prepared.model, task or prepared.task(), settings, run, enough=enough)
    if resume and run.last.exists():
        trainer.resume()
        console.print(f"going on after update {trainer.progress.step:,}")
        if trainer.lost:
            console.print(f"note: the checkpoints of updates {trainer.lost} are gone; the run goes on without them")
    elif resume:
        run.rewind_log(0)
        console.print("nothing had been saved yet; starting again from the first update")
    if trainer.done():
        return Outcome(trainer, f"nothing left to do: {trainer.done()}", 0)
    with TrainingProgress(console, settings, trainer.progress.step, unit=prepared.unit) as progress:
        trainer.report = progress
        reason = trainer.run()
    return Outcome(trainer, reason, _SIGNALS.get(reason, 0))


def say_end(task: str, outcome: Outcome, run: RunDirectory, console: Console) -> None:
    """Say where the model is, how good it is, and what to do next."""
    progress = outcome.trainer.progress
    console.print(f"ended after update {progress.step:,}: {outcome.reason}")
    if progress.best_score is None:
        console.print(f"the model is in {run.path}; it was not validated yet")
    else:
        by_score = outcome.trainer.settings.metric_for_best == "score"
        best, averaged = progress.best_score, progress.averaged_score
        name = f"the best model, after update {progress.best_step:,}," if averaged is None else "the averaged model"
        value = best if averaged is None else averaged
        score = f"{outcome.trainer.task.metric} {value:.2f}" if by_score else f"loss {short(-value, 4)}"
        console.print(f"{name} is in {run.path}: validation {score}")
    (train, use), place = _COMMANDS[task], shlex.quote(str(run.path))
    if outcome.code:
        console.print(f"everything is saved; go on with: {program()} {train} --out {place} --resume")
    else:
        console.print(f"next: {program()} {use.format(run=place)}")
