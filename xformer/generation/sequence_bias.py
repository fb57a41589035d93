"""Phrases that an output should favor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from xformer.errors import DataError

Tokens = Sequence[int]
Phrase = Sequence[Tokens]
"""Alternative tokenizations of one phrase: at the start of a text, after a space, capitalized, ..."""

_BEGIN, _CONTINUE = 1.0, 2.0


@dataclass(frozen=True)
class PhraseSet:
    """The phrases that one output favors.

    Only tokens are compared: a phrase counts as present even if later tokens turn its last word into a longer one.

    Attributes:
        phrases: Alternative tokenizations of each phrase; any one of them counts as the phrase.
    """

    phrases: tuple[tuple[tuple[int, ...], ...], ...]

    @classmethod
    def make(cls, phrases: Sequence[Phrase], vocab_size: int) -> PhraseSet:
        """Check and convert phrases; raises DataError for empty ones and for ids outside the vocabulary."""
        for phrase in phrases:
            if not phrase or not all(phrase):
                raise DataError(f"sequence_bias has the phrase {list(phrase)!r}; expected at least one token id")
            for token in (token for tokens in phrase for token in tokens):
                if not 0 <= token < vocab_size:
                    raise DataError(f"sequence_bias has token id {token}; expected 0 to {vocab_size - 1}")
        return cls(tuple(tuple(tuple(map(int, tokens)) for tokens in phrase) for phrase in phrases))

    def weights(self, history: Tokens) -> dict[int, float]:
        """Return the tokens to favor after `history`, with their weights.

        A phrase that is already present has no effect. A token that begins a phrase has weight 1. If the history ends
        with the beginning of a phrase, the token that continues it has weight 2: half a word is useless, and its
        beginning shows that it fits. If several phrases favor a token, it has the largest weight, not the sum.
        """
        weights: dict[int, float] = {}
        for phrase in self.phrases:
            if any(_contains(history, tokens) for tokens in phrase):
                continue
            for tokens in phrase:
                weights[tokens[0]] = max(weights.get(tokens[0], 0.0), _BEGIN)
                matched = _matched_length(history, tokens)
                if matched:
                    weights[tokens[matched]] = _CONTINUE
        return weights


def phrase_sets(
    sequence_bias: Sequence[Sequence[Phrase]] | None, num_inputs: int, vocab_size: int
) -> list[PhraseSet] | None:
    """Return one set of phrases per input, or None; raises DataError for a wrong number of them."""
    if sequence_bias is None:
        return None
    if len(sequence_bias) != num_inputs:
        raise DataError(
            f"sequence_bias has {len(sequence_bias)} entries for {num_inputs} inputs; expected one list each"
        )
    return [PhraseSet.make(phrases, vocab_size) for phrases in sequence_bias]


def _contains(history: Tokens, tokens: tuple[int, ...]) -> bool:
    size = len(tokens)
    return tokens[0] in history and any(
        tuple(history[start : start + size]) == tokens for start in range(len(history) - size + 1)
    )


def _matched_length(history: Tokens, tokens: tuple[int, ...]) -> int:
    """Return the length of the longest proper beginning of `tokens` that the history ends with."""
    for size in range(min(len(tokens) - 1, len(history)), 0, -1):
        if tuple(history[len(history) - size :]) == tokens[:size]:
            return size
    return 0
