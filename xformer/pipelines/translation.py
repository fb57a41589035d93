"""From sentences to translations."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from xformer.errors import CheckpointError, DataError
from xformer.generation import greedy
from xformer.models import Transformer
from xformer.text import Tokenizer
from xformer.training.batches import pad
from xformer.training.run_directory import RunDirectory


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
        """Load the best model of a training run; raises CheckpointError when something is missing or damaged."""
        run = RunDirectory(Path(directory))
        run.read_config()
        model = Transformer.load(run.model, xp=xp, dtype=dtype)
        if run.tokenizer("joint").exists():
            joint = Tokenizer.load(run.tokenizer("joint"))
            return cls(model, joint, joint)
        return cls(model, Tokenizer.load(run.tokenizer("source")), Tokenizer.load(run.tokenizer("target")))

    def __call__(
        self,
        sentences: Sequence[str],
        *,
        batch_tokens: int = 4096,
        max_length: int | None = None,
        max_source_length: int = 1024,
    ) -> list[str]:
        """Translate sentences, keeping their order; an empty line stays empty.

        batch_tokens: most source tokens in a batch, padding included. max_length: most tokens of a translation
        (default: twice the longest source sentence of its batch plus 20).

        Raises DataError when a sentence has more than max_source_length tokens.
        """
        encoded = self.source_tokenizer.encode_batch(list(sentences))
        for number, ids in enumerate(encoded, start=1):
            if len(ids) > max_source_length:
                raise DataError(
                    f"sentence {number} has {len(ids)} tokens; at most {max_source_length} are accepted; split it"
                )
        results = [""] * len(encoded)
        for rows in _by_length(encoded, batch_tokens):
            source = pad([[*encoded[row], self.model.config.eos_id] for row in rows], self.model.config.pad_id)
            limit = 2 * len(source[0]) + 20 if max_length is None else max_length
            outputs = greedy(self.model, source, max_length=limit)
            for row, text in zip(rows, self.target_tokenizer.decode_batch(outputs), strict=True):
                results[row] = text
        return results


def _by_length(encoded: Sequence[Sequence[int]], batch_tokens: int) -> Iterator[list[int]]:
    """Group rows of similar length; empty sentences are in no group."""
    rows = sorted((row for row in range(len(encoded)) if encoded[row]), key=lambda row: (len(encoded[row]), row))
    batch: list[int] = []
    for row in rows:
        if batch and (len(encoded[row]) + 1) * (len(batch) + 1) > batch_tokens:
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch
