"""What is asked of a model along with the texts, in terms of tokens."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from xformer.errors import ConfigError, DataError
from xformer.pipelines.requests import GenerationRequest
from xformer.text import UNK_ID


class Wishes:
    """A request in terms of tokens, text by text.

    writer: the TextToText that is asked; count: how many texts there are.
    """

    def __init__(self, writer: Any, request: GenerationRequest, count: int) -> None:
        target, config = writer.tokenizers.target, writer.model.config
        prefixes, topics, lengths = request.prefixes(count), request.topics_of_each(count), request.lengths(count)
        self._prefixes = None if prefixes is None else [_prefix(target, prefix) for prefix in prefixes]
        self._topics = (
            None if topics is None else [[target.phrase_ids(topic).anywhere for topic in each] for each in topics]
        )
        self._lengths = lengths
        in_words = lengths is not None and request.length_unit == "words"
        self._told = _told_lengths(writer, lengths, in_words, count) if config.length_encoding else None
        self._length_of = _counter_of_words(target) if in_words else None
        self.decoding, limit = request.decoding, writer.usual_limit
        if limit is not None and lengths is None and self.decoding.max_length is self.decoding.max_length_ratio is None:
            self.decoding = replace(self.decoding, max_length=max(limit, self.decoding.min_length))

    def of(self, rows: Sequence[int]) -> dict[str, Any]:
        """The arguments of `decode` for these texts."""
        columns = {
            "prefix": self._prefixes,
            "topics": self._topics,
            "desired_lengths": self._lengths,
            "told_lengths": self._told,
        }
        chosen = {name: [column[row] for row in rows] for name, column in columns.items() if column is not None}
        return {**chosen, "length_of": self._length_of}

    def told(self, row: int) -> int | None:
        """The length that the model is told for a text, in tokens, if it wants to know one."""
        return None if self._told is None else self._told[row]


def _counter_of_words(tokenizer: Any) -> Callable[[Sequence[int]], int]:
    """How many words token ids spell; it remembers, since a search asks for the same tokens several times."""
    count = functools.lru_cache(maxsize=65536)(lambda tokens: len(tokenizer.decode(tokens).split()))
    return lambda tokens: count(tuple(tokens))


def _told_lengths(writer: Any, lengths: list[int] | None, in_words: bool, count: int) -> list[int]:
    """What a model with a length encoding is told: the desired lengths in tokens, or else a usual one."""
    if lengths is None:
        if writer.mean_length is None:
            raise ConfigError("this model writes to a length; give desired_length")
        return [max(1, round(writer.mean_length))] * count
    if not in_words:
        return lengths
    if writer.tokens_per_word is None:
        raise ConfigError("how many tokens a word has is not known here; give desired_length in tokens")
    return [max(1, round(length * writer.tokens_per_word)) for length in lengths]


def _prefix(tokenizer: Any, prefix: str) -> list[int]:
    """The ids of a prefix; raises DataError for characters that the tokenizer cannot write."""
    ids: list[int] = tokenizer.encode(prefix)
    if UNK_ID in ids:
        raise DataError(f"the prefix {prefix!r} has characters that the tokenizer does not know; choose others")
    return ids
