"""`train-lm`: a run on one long text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from xformer.cli.backend import open_backend
from xformer.cli.console import plural
from xformer.cli.train_request import Work
from xformer.cli.training import Prepared
from xformer.models import LanguageModel, LanguageModelConfig
from xformer.runs.recipe import error_context
from xformer.text import UNK_ID, Tokenizer, read_text
from xformer.threads import num_threads
from xformer.training import LanguageModelTask, Recipe, RunDirectory, TextTokenizerSettings
from xformer.training.data_parallel import shards_for


@dataclass(frozen=True)
class PreparedText(Prepared):
    """A text as token ids, and a model that is to learn it. num_characters: of the training and validation text."""

    tokenizer: Tokenizer
    train: Any
    valid: Any
    num_characters: tuple[int, int]

    @classmethod
    def make(
        cls, recipe: Recipe, train: str, valid: str, *, xp: Any, backend: str, tokenizer: Tokenizer | None = None
    ) -> PreparedText:
        """Learn a tokenizer (unless given), encode the text, and make the model.

        Raises DataError for text that is too short, ConfigError for a vocabulary that does not fit the recipe.
        """
        with error_context("[tokenizer]"):
            tokenizer = tokenizer or learn(train, recipe.tokenizer)
        ids = [np.asarray(tokenizer.encode_text(text), dtype=np.int64) for text in (train, valid)]
        config = LanguageModelConfig(vocab_size=tokenizer.vocab_size, **recipe.model)
        settings = recipe.training
        model = LanguageModel(config, xp=xp, seed=settings.seed, dtype=settings.dtype)
        # Results depend on the number of shards in their last bits, so the run remembers it.
        recipe = recipe.with_training(shards=settings.shards or shards_for(model, num_threads()))
        made = cls(recipe, model, backend, tokenizer, ids[0], ids[1], (len(train), len(valid)))
        made.task()  # refuses a text that is too short
        return made

    def task(self) -> LanguageModelTask:
        """What a trainer is told about the work."""
        settings = self.recipe.training
        return LanguageModelTask(
            self.model,
            self.train,
            self.valid,
            context_length=settings.context_length,
            batch_size=settings.batch_size,
        )

    def tokenizers(self) -> dict[str, Tokenizer]:
        """The tokenizer, under the name that a run directory keeps it by."""
        return {"joint": self.tokenizer}

    def counts(self) -> dict[str, int]:
        """How much text there is."""
        return {
            "train_characters": self.num_characters[0],
            "train_tokens": len(self.train),
            "valid_characters": self.num_characters[1],
            "valid_tokens": len(self.valid),
            "valid_tokens_unknown": self.num_unknown,
        }

    @property
    def num_unknown(self) -> int:
        """Tokens of the validation text that the training text does not have."""
        return int((self.valid == UNK_ID).sum())

    def text_lines(self) -> Iterator[str]:
        """Say how much text there is, in words."""
        notes = ["", f", {self.num_unknown:,} of them unknown" if self.num_unknown else ""]
        texts = (self.train, self.valid)
        for name, count, ids, note in zip(("training", "validation"), self.num_characters, texts, notes, strict=True):
            tokens = "" if self.tokenizer.model == "characters" else f", {plural(len(ids), 'token')}"
            yield f"{name}: {plural(count, 'character')}{tokens}{note}"

    def vocabulary(self) -> str:
        """Say how large the vocabulary is, in words."""
        return f"vocabulary of {self.tokenizer.vocab_size:,}"

    @property
    def unit(self) -> str:
        """What speed is counted in."""
        return "tokens"


def learn(text: str, settings: TextTokenizerSettings) -> Tokenizer:
    """Learn the tokenizer of a text; raises what `Tokenizer.train` raises."""
    return Tokenizer.train(
        [text],
        settings.vocab_size,
        lowercase=settings.lowercase,
        model=settings.model,
        unicode_form=settings.unicode_form,
    )


def split(text: str, valid_share: float) -> tuple[str, str]:
    """Keep the end of a text for validation, as nanoGPT does: a share of its characters, but for the first one.

    >>> split("abcdefghij", 0.1)
    ('abcdefghi', 'j')
    """
    place = max(1, int(len(text) * (1.0 - valid_share)))
    return text[:place], text[place:]


def _prepare(recipe: Recipe, backend: str, files: Mapping[str, Path], run: RunDirectory | None) -> PreparedText:
    xp = open_backend(backend, recipe.training.dtype, recipe.training.precision)
    text = read_text(files["text"])
    if "valid_text" in files:
        train, valid = text, read_text(files["valid_text"])
    else:
        train, valid = split(text, recipe.training.valid_share)
    tokenizer = None if run is None else run.load_tokenizer("joint")
    return PreparedText.make(recipe, train, valid, xp=xp, backend=backend, tokenizer=tokenizer)


TEXT = Work("train-lm", ("language_modeling",), ("text",), ("valid_text",), _prepare)
