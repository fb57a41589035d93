"""`train` and `demo`: a run on pairs of texts."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xformer.cli.backend import open_backend
from xformer.cli.console import plural
from xformer.cli.train_request import Work
from xformer.cli.training import Prepared
from xformer.pipelines import EncodedCorpus, Tokenizers, ValidationScore
from xformer.runs.recipe import error_context
from xformer.text import ParallelCorpus, Tokenizer, read_parallel
from xformer.threads import num_threads
from xformer.training import Recipe, RunDirectory, TranslationTask
from xformer.training.data_parallel import shards_for

# What a training pair is called, by task.
_UNITS = {"translation": "sentence pair", "summarization": "document"}
_COLUMNS = ("source", "target", "valid_source", "valid_target")


@dataclass(frozen=True)
class PreparedPairs(Prepared):
    """Pairs of texts, and a model that is to learn from them."""

    sides: Tokenizers
    train: EncodedCorpus
    valid: EncodedCorpus

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
    ) -> PreparedPairs:
        """Learn tokenizers (unless given), encode the text, and make the model.

        names: of the four columns of text, for errors: train source, target, validation source, target.
        Raises DataError for text that does not fit the recipe, ConfigError for a vocabulary that does not.
        """
        with error_context("[tokenizer]"):
            tokenizers = tokenizers or Tokenizers.train(train, recipe.tokenizer)
        settings = recipe.training
        encode = functools.partial(
            EncodedCorpus.encode,
            tokenizers=tokenizers,
            max_length=settings.max_length,
            truncation=settings.truncation,
        )
        encoded, encoded_valid = encode(train, names=names[:2]), encode(valid, names=names[2:])
        model = tokenizers.make_model(recipe, xp)
        # Results depend on the number of shards in their last bits, so the run remembers it.
        recipe = recipe.with_training(shards=settings.shards or shards_for(model, num_threads()))
        return cls(recipe, model, backend, tokenizers, encoded, encoded_valid)

    def task(self, score: ValidationScore | None = None) -> TranslationTask:
        """What a trainer is told about the work. score: default that of the task."""
        score = score or ValidationScore(self.valid, self.sides, self.recipe.task)
        return TranslationTask(
            self.model,
            self.train.pairs,
            self.valid.pairs,
            batch_tokens=self.recipe.training.batch_tokens,
            score=score,
            metric=score.name,
        )

    def tokenizers(self) -> dict[str, Tokenizer]:
        """The tokenizers, under the names that a run directory keeps them by."""
        return self.sides.by_side()

    def counts(self) -> dict[str, int]:
        """How much text there is."""
        source_tokens, target_tokens = self.train.num_tokens
        return {
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
        }

    def text_lines(self) -> Iterator[str]:
        """Say how much text there is, in words."""
        for name, corpus in (("training", self.train), ("validation", self.valid)):
            yield f"{name}: {plural(len(corpus.pairs), _UNITS[self.recipe.task])}{_left_out(corpus)}"

    def vocabulary(self) -> str:
        """Say how large the vocabulary is, in words."""
        sizes = [f"{tokenizer.vocab_size:,}" for tokenizer in self.tokenizers().values()]
        return f"joint vocabulary of {sizes[0]}" if len(sizes) == 1 else f"vocabularies of {sizes[0]} and {sizes[1]}"

    @property
    def unit(self) -> str:
        """What speed is counted in."""
        return "target tokens"


def _prepare(recipe: Recipe, backend: str, files: Mapping[str, Path], run: RunDirectory | None) -> PreparedPairs:
    xp = open_backend(backend, recipe.training.dtype, recipe.training.precision)
    train = read_parallel(files["source"], files["target"])
    valid = read_parallel(files["valid_source"], files["valid_target"])
    names = [files[name] for name in _COLUMNS]
    tokenizers = None if run is None else Tokenizers.load(run)
    made = PreparedPairs.make(recipe, train, valid, xp=xp, backend=backend, names=names, tokenizers=tokenizers)
    made.task()  # refuses where the package is missing that measures what the model writes
    return made


PAIRS = Work("train", tuple(_UNITS), _COLUMNS, (), _prepare)


def _left_out(corpus: EncodedCorpus) -> str:
    blank = corpus.text.num_dropped - corpus.num_long
    reasons = [f"{blank:,} with a blank side"] if blank else []
    reasons += [f"{corpus.num_long:,} too long"] if corpus.num_long else []
    notes = [f"left out: {', '.join(reasons)}"] if reasons else []
    notes += [f"cut to the limit: {plural(corpus.num_cut, 'source')}"] if corpus.num_cut else []
    return f" ({'; '.join(notes)})" if notes else ""
