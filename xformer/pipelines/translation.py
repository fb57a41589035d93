"""From sentences to translations."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from xformer.errors import CheckpointError, ConfigError, DataError
from xformer.generation import greedy
from xformer.host import available_threads, one_blas_thread, side_by_side
from xformer.models import Transformer
from xformer.pipelines.tokenizers import Tokenizers
from xformer.text import Tokenizer
from xformer.training.batches import pad
from xformer.training.parallel import shards_for
from xformer.training.run_directory import RunDirectory


class Translation(NamedTuple):
    """One translated sentence. row: its place among the sources; cut: it reached the length limit without ending."""

    row: int
    text: str
    cut: bool


class Translator:
    """A model with its tokenizers: `Translator.from_pretrained("run", xp=numpy)(["Ein Mann schläft ."])`."""

    def __init__(self, model: Transformer, source_tokenizer: Tokenizer, target_tokenizer: Tokenizer) -> None:
        self.model = model
        self.source_tokenizer = source_tokenizer
        self.target_tokenizer = target_tokenizer
        for side, tokenizer, size in (
            ("source", source_tokenizer, model.config.source_vocab_size),
            ("target", target_tokenizer, model.config.target_vocab_size),
        ):
            if tokenizer.vocab_size != size:
                raise CheckpointError(
                    f"the {side} tokenizer has {tokenizer.vocab_size} tokens, the model {size}; they are not of one run"
                )

    @classmethod
    def from_pretrained(cls, directory: str | os.PathLike[str], *, xp: Any, dtype: Any = None) -> Translator:
        """Load the best model of a training run.

        Raises CheckpointError when something is missing, damaged, or does not belong to the run.
        """
        run = RunDirectory(Path(directory))
        run.read_config()
        model = Transformer.load(run.model, xp=xp, dtype=dtype)
        return cls(model, *Tokenizers.load(run))

    def __call__(
        self,
        sentences: Sequence[str],
        *,
        batch_tokens: int = 4096,
        max_length: int | None = None,
        max_source_length: int = 1024,
    ) -> list[str]:
        """Translate sentences, keeping their order; a blank line becomes an empty one.

        Arguments and errors are those of `batches`.
        """
        results = [""] * len(sentences)
        for batch in self.batches(
            sentences, batch_tokens=batch_tokens, max_length=max_length, max_source_length=max_source_length
        ):
            for translation in batch:
                results[translation.row] = translation.text
        return results

    def batches(
        self,
        sentences: Sequence[str],
        *,
        batch_tokens: int = 4096,
        max_length: int | None = None,
        max_source_length: int = 1024,
    ) -> Iterator[list[Translation]]:
        """Yield translations as batches of similar length get done, the shortest sentences first, blank ones never.

        batch_tokens: most source tokens in a batch, padding included; on NumPy each core works on one.
        max_length: most tokens of a translation (default: twice the source sentence's plus 20).

        Raises DataError, before anything is translated, when a sentence has more than max_source_length tokens;
        ConfigError for a limit below 1.
        """
        encoded = self.encode(sentences)
        check_lengths(encoded, max_source_length)
        yield from self.batches_of_ids(encoded, batch_tokens=batch_tokens, max_length=max_length)

    def batches_of_ids(
        self, encoded: Sequence[Sequence[int]], *, batch_tokens: int = 4096, max_length: int | None = None
    ) -> Iterator[list[Translation]]:
        """Do the same as `batches` for sentences that `encode` made token ids of, however long they are.

        Raises ConfigError for a limit below 1.
        """
        if batch_tokens < 1:
            raise ConfigError(f"batch_tokens is {batch_tokens}; expected at least 1")

        def translate(rows: list[int]) -> list[Translation]:
            source = pad([[*encoded[row], self.model.config.eos_id] for row in rows], self.model.config.pad_id)
            limits = [2 * len(encoded[row]) + 20 if max_length is None else max_length for row in rows]
            outputs = greedy(self.model, source, max_length=limits)
            texts = self.target_tokenizer.decode_batch(outputs)
            return [
                Translation(row, text, len(ids) == limit)
                for row, text, ids, limit in zip(rows, texts, outputs, limits, strict=True)
            ]

        threads = shards_for(self.model, available_threads())
        batches = _by_length(encoded, batch_tokens)
        while group := list(itertools.islice(batches, threads)):
            # The products of decoding are small: threads inside them cost more than they gain, above all on a busy
            # machine, where one of them waits for the other at every token.
            with one_blas_thread() if threads > 1 else contextlib.nullcontext():
                done = side_by_side(translate, group)
            yield from done

    def encode(self, sentences: Sequence[str]) -> list[list[int]]:
        """Turn sentences into token ids; a blank sentence has none."""
        encoded = self.source_tokenizer.encode_batch(list(sentences))
        return [[] if sentence.isspace() else ids for sentence, ids in zip(sentences, encoded, strict=True)]


def check_lengths(
    encoded: Sequence[Sequence[int]], max_source_length: int, *, name: str = "sentence", first_number: int = 1
) -> None:
    """Raise DataError for the first sentence that has more than max_source_length tokens.

    name, first_number: what the error calls a sentence, and the number that it gives the first one.
    """
    for number, ids in enumerate(encoded, start=first_number):
        if len(ids) > max_source_length:
            raise DataError(f"{name} {number} has {len(ids)} tokens; expected at most {max_source_length}; split it up")


def _by_length(encoded: Sequence[Sequence[int]], batch_tokens: int) -> Iterator[list[int]]:
    """Group rows of similar length; blank ones are in no group."""
    batch: list[int] = []
    filled = [row for row, ids in enumerate(encoded) if ids]
    for row in sorted(filled, key=lambda row: (len(encoded[row]), row)):
        if batch and (len(encoded[row]) + 1) * (len(batch) + 1) > batch_tokens:
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch
