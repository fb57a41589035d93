"""What `train` and `demo` share: a run from text in memory to a trained model on disk."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console

import xformer
from xformer.cli.console import plural, program
from xformer.cli.progress import TrainingProgress
from xformer.host import available_threads
from xformer.models import Transformer
from xformer.pipelines import EncodedCorpus, Tokenizers, ValidationScore
from xformer.text import ParallelCorpus
from xformer.training import Recipe, RunDirectory, Trainer, TranslationTask, Validation
from xformer.training.parallel import shards_for

# By task: what a training pair is called, and the command that uses the model.
_UNITS = {"translation": "sentence pair", "summarization": "document"}
_COMMANDS = {"translation": "translate", "summarization": "summarize"}


@dataclass(frozen=True)
class Prepared:
    """Everything that training needs, checked, before anything is written. recipe: with the number of shards."""

    recipe: Recipe
    tokenizers: Tokenizers
    train: EncodedCorpus
    valid: EncodedCorpus
    model: Transformer
    backend: str

    @classmethod
    def make(
        cls,
        recipe: Recipe,
        train: ParallelCorpus,
        valid: ParallelCorpus,
        *,
        xp: Any,
        backend: str,
        names: Sequence[Any],
        tokenizers: Tokenizers | None = None,
    ) -> Prepared:
        """Learn tokenizers (unless given), encode the text, and make the model.

        names: of the four columns of text, for errors: train source, target, validation source, target.
        Raises DataError for text that does not fit the recipe, ConfigError for a vocabulary that does not.
        """
        tokenizers = tokenizers or Tokenizers.train(train, recipe.tokenizer)
        settings = recipe.training
        encode = functools.partial(
            EncodedCorpus.encode,
            tokenizers=tokenizers,
            max_length=settings.max_length,
            long_lines=settings.long_lines,
        )
        encoded, encoded_valid = encode(train, names=names[:2]), encode(valid, names=names[2:])
        model = tokenizers.make_model(recipe, xp)
        # Results depend on the number of shards in their last bits, so the run remembers it.
        recipe = recipe.with_training(shards=settings.shards or shards_for(model, available_threads()))
        return cls(recipe, tokenizers, encoded, encoded_valid, model, backend)

    def config(self, kind: str, data: dict[str, Any]) -> dict[str, Any]:
        """What the run directory keeps about the run, as JSON. kind: the command; data: where the text came from."""
        source_tokens, target_tokens = self.train.num_tokens
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
            "counts": {
                "train_pairs": len(self.train.pairs),
                "train_source_tokens": source_tokens,
                "train_target_tokens": target_tokens,
                "train_target_words": sum(len(line.split()) for line in self.train.text.target),
                "train_pairs_dropped_blank": self.train.text.num_dropped - self.train.num_long,
                "train_pairs_dropped_long": self.train.num_long,
                "train_sources_cut": self.train.num_cut,
                "valid_pairs": len(self.valid.pairs),
                "valid_pairs_dropped_blank": self.valid.text.num_dropped - self.valid.num_long,
                "valid_pairs_dropped_long": self.valid.num_long,
                "valid_sources_cut": self.valid.num_cut,
            },
        }

    def describe(self, console: Console) -> None:
        """Say in three lines what is about to be trained on what."""
        for name, corpus in (("training", self.train), ("validation", self.valid)):
            console.print(f"{name}: {plural(len(corpus.pairs), _UNITS[self.recipe.task])}{_left_out(corpus)}")
        sizes = [tokenizer.vocab_size for tokenizer in self.tokenizers.by_side().values()]
        vocabulary = (
            f"joint vocabulary of {sizes[0]:,}" if len(sizes) == 1 else f"vocabularies of {sizes[0]:,} and {sizes[1]:,}"
        )
        settings = self.recipe.training
        console.print(
            f"model: {plural(self.model.parameter_count(), 'parameter')}, {vocabulary} tokens; "
            f"{self.backend}, {settings.dtype}, {plural(settings.shards, 'shard')}, seed {settings.seed}"
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
    score: ValidationScore | None = None,
    enough: Callable[[Validation], bool] = lambda validation: False,
) -> Outcome:
    """Train in a directory that was started, showing progress; returns how it ended.

    resume: go on from the directory's last state, or from the beginning where there is none yet.
    """
    settings = prepared.recipe.training
    score = score or ValidationScore(prepared.valid, prepared.tokenizers, prepared.recipe.task)
    task = TranslationTask(
        prepared.model,
        prepared.train.pairs,
        prepared.valid.pairs,
        batch_tokens=settings.batch_tokens,
        score=score,
        metric=score.name,
    )
    trainer = Trainer(prepared.model, task, settings, run, enough=enough)
    if resume and run.last.exists():
        trainer.resume()
        console.print(f"going on after update {trainer.progress.step:,}")
    elif resume:
        run.rewind_log(0)
        console.print("nothing had been saved yet; starting again from the first update")
    if trainer.done():
        return Outcome(trainer, f"nothing left to do: {trainer.done()}", 0)
    with TrainingProgress(console, settings, trainer.progress.step) as progress:
        trainer.report = progress
        reason = trainer.run()
    return Outcome(trainer, reason, {"stopped by SIGINT": 130, "stopped by SIGTERM": 143}.get(reason, 0))


def say_end(task: str, outcome: Outcome, run: RunDirectory, console: Console) -> None:
    """Say where the model is, how good it is, and what to do next."""
    progress = outcome.trainer.progress
    console.print(f"ended after update {progress.step:,}: {outcome.reason}")
    if progress.best_score is None:
        console.print(f"the model is in {run.path}; it was not validated yet")
    else:
        by_score = outcome.trainer.settings.select_by == "score"
        best, averaged = progress.best_score, progress.averaged_score
        name = f"the best model, after update {progress.best_step:,}," if averaged is None else "the averaged model"
        value = best if averaged is None else averaged
        score = f"{outcome.trainer.task.metric} {value:.2f}" if by_score else f"loss {-value:.4f}"
        console.print(f"{name} is in {run.path}: validation {score}")
    if outcome.code:
        console.print(f"everything is saved; go on with: {program()} train --out {run.path} --resume")
    else:
        console.print(f"next: {program()} {_COMMANDS[task]} --model {run.path} --input FILE --output FILE")


def _left_out(corpus: EncodedCorpus) -> str:
    blank = corpus.text.num_dropped - corpus.num_long
    reasons = [f"{blank:,} with a blank side"] if blank else []
    reasons += [f"{corpus.num_long:,} too long"] if corpus.num_long else []
    notes = [f"left out: {', '.join(reasons)}"] if reasons else []
    notes += [f"cut to the limit: {corpus.num_cut:,} sources"] if corpus.num_cut else []
    return f" ({'; '.join(notes)})" if notes else ""
