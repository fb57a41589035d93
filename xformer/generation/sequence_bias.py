"""Phrases that an output should favor."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from xformer.errors import DataError
from xformer.models.token_ids import check_one_each, check_tokens

Tokens = Sequence[int]
Phrase = Sequence[Tokens]
"""Alternative tokenizations of one phrase: at the start of a text, after a space, capitalized, ..."""

_BEGIN, _CONTINUE = 1.0, 2.0


def check_sequence_bias(
    sequence_bias: Sequence[Sequence[Phrase]] | None, num_inputs: int, vocab_size: int
) -> list[list[Phrase]] | None:
    """Return the phrases of each input, or None; raise DataError for empty ones and for ids outside the vocabulary."""
    if sequence_bias is None:
        return None
    check_one_each("sequence_bias", sequence_bias, num_inputs)
    try:
        rows = [[list(phrase) for phrase in phrases] for phrases in sequence_bias]
    except TypeError as error:
        raise DataError(f"sequence_bias is {sequence_bias!r}; expected a list of phrases for each input") from error
    for phrase in itertools.chain.from_iterable(rows):
        phrase[:] = [check_tokens("sequence_bias", tokens, vocab_size) for tokens in phrase]
        if not phrase or not all(phrase):
            raise DataError(f"sequence_bias has the phrase {phrase!r}; expected at least one token id")
    return [[[tuple(tokens) for tokens in phrase] for phrase in phrases] for phrases in rows]


def phrase_weights(phrases: Sequence[Phrase], history: Tokens) -> dict[int, float]:
    """Return the tokens to favor after `history`, with their weights.

    A phrase that is already present has no effect; only tokens are compared, so it counts as present even if later
    tokens turn its last word into a longer one. A token that begins a phrase has weight 1. If the history ends with the
    beginning of a phrase, the token that continues it has weight 2: half a word is useless, and its beginning shows
    that it fits. If several phrases favor a token, it has the largest weight, not the sum.
    """
    weights: dict[int, float] = {}
    for phrase in phrases:
        if any(_contains(history, tokens) for tokens in phrase):
            continue
        for tokens in phrase:
            weights[tokens[0]] = max(weights.get(tokens[0], 0.0), _BEGIN)
            matched = _matched_length(history, tokens)
            if matched:
                weights[tokens[matched]] = _CONTINUE
    return weights


def _contains(history: Tokens, tokens: Tokens) -> bool:
    size = len(tokens)
    return tokens[0] in history and any(
        tuple(history[start : start + size]) == tokens for start in range(len(history) - size + 1)
    )


def _matched_length(history: Tokens, tokens: Tokens) -> int:
    """Return the length of the longest proper beginning of `tokens` that the history ends with."""
    for size in range(min(len(tokens) - 1, len(history)), 0, -1):
        if tuple(history[len(history) - size :]) == tokens[:size]:
            return size
    return 0
