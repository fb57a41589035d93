"""Topic focus: words and phrases that the output should favor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from xformer.errors import DataError

Tokens = Sequence[int]
# One phrase, as all the ways in which the tokenizer may write it: "city" at a start, after a space, in capitals.
Phrase = Sequence[Tokens]

BEGIN, CONTINUE = 1.0, 2.0


@dataclass(frozen=True)
class TopicFocus:
    """The phrases that one output should favor.

    phrases: each a list of alternative tokenizations, each a list of token ids; to have any one of them is to have
    the phrase. Tokens are all that is looked at: a phrase counts as written although more tokens may make a longer word
    of its last one.
    """

    phrases: tuple[tuple[tuple[int, ...], ...], ...]

    @classmethod
    def of(cls, phrases: Sequence[Phrase], vocab_size: int) -> TopicFocus:
        """Check phrases; raises DataError for an empty one and for ids outside the vocabulary."""
        for phrase in phrases:
            if not phrase or not all(phrase):
                raise DataError(f"topic phrase {list(phrase)!r} has no tokens; expected at least one token id")
            for token in (token for tokens in phrase for token in tokens):
                if not 0 <= token < vocab_size:
                    raise DataError(f"topic has the token id {token}; expected 0 to {vocab_size - 1}")
        return cls(tuple(tuple(tuple(map(int, tokens)) for tokens in phrase) for phrase in phrases))

    def wanted(self, history: Tokens) -> dict[int, float]:
        """The tokens to favor after `history`, with their weights.

        A phrase that is there already has no say. A token that begins a phrase weighs 1. Where the history ends with
        the beginning of a phrase, the token that continues it weighs 2: half a word helps nobody, and having begun is
        evidence that it fits. A token that several phrases want has the largest weight, not the sum.
        """
        weights: dict[int, float] = {}
        for phrase in self.phrases:
            if any(_contains(history, tokens) for tokens in phrase):
                continue
            for tokens in phrase:
                weights[tokens[0]] = max(weights.get(tokens[0], 0.0), BEGIN)
                begun = _matched(history, tokens)
                if begun:
                    weights[tokens[begun]] = CONTINUE
        return weights


def _contains(history: Tokens, tokens: tuple[int, ...]) -> bool:
    size = len(tokens)
    return tokens[0] in history and any(
        tuple(history[start : start + size]) == tokens for start in range(len(history) - size + 1)
    )


def _matched(history: Tokens, tokens: tuple[int, ...]) -> int:
    """How many tokens of the phrase, but not all, the history ends with; the most there are."""
    for size in range(min(len(tokens) - 1, len(history)), 0, -1):
        if tuple(history[len(history) - size :]) == tokens[:size]:
            return size
    return 0


def topic_foci(topics: Sequence[Sequence[Phrase]] | None, sentences: int, vocab_size: int) -> list[TopicFocus] | None:
    """One focus a sentence, or None; raises DataError for another number of topics than of sentences."""
    if topics is None:
        return None
    if len(topics) != sentences:
        raise DataError(f"topics has {len(topics)} entries for {sentences} sentences; expected one list each")
    return [TopicFocus.of(phrases, vocab_size) for phrases in topics]


def weights_of_rows(foci: Sequence[TopicFocus], histories: Sequence[Tokens], sentences: Sequence[int]) -> list[Any]:
    """What each row favors: `TopicFocus.wanted` of its sentence and history."""
    return [foci[sentence].wanted(history) for history, sentence in zip(histories, sentences, strict=True)]
