"""Logits processors: functions that change the logits before a token is chosen.

A processor takes the token histories of all rows and their logits, and returns new logits. As in Hugging Face, greedy
search and sampling normalize the logits after the processors; beam search normalizes them before, so the processors get
log-probabilities and their results are added up. Histories are on the host, so the processors here never wait for a
GPU: they build masks on the host and move them to the device once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from xformer.backends import Array, array_namespace, device, from_host
from xformer.generation.config import GenerationConfig
from xformer.generation.lengths import LengthLimits
from xformer.generation.sequence_bias import Phrase, phrase_weights

Tokens = Sequence[int]


class Histories(list[list[int]]):
    """Token ids of each row so far: prompt and forced prefix included, bos excluded.

    Attributes:
        input_indices: Index of the input that each row belongs to; rows of finished inputs leave the batch.
        indices: Index of that input in the list that the pipeline received, or `indices` of `generate`.
        normalized: Whether the logits of these rows are log-probabilities, as in beam search.
    """

    def __init__(
        self,
        tokens: Iterable[list[int]],
        input_indices: Sequence[int],
        indices: Sequence[int] | None = None,
        *,
        normalized: bool = False,
    ) -> None:
        super().__init__(tokens)
        self.input_indices = list(input_indices)
        self.indices = self.input_indices if indices is None else list(indices)
        self.normalized = normalized


LogitsProcessor = Callable[[Histories, Array], Array]
"""Function of the token histories of all rows and their logits (rows, vocabulary) that returns logits of that shape.

Logits have at least float32 precision. -inf masks a token; at least one token of each row must stay finite. A processor
may be any callable: `lambda histories, logits: logits / 2`. Rows are batched: samples or beams of all inputs. In beam
search the logits are log-probabilities. If a processor raises one above zero, the row is shifted so that its largest is
zero: scores never increase.
"""


def build_logits_processors(
    config: GenerationConfig,
    *,
    vocab_size: int,
    eos_id: int | None,
    end_ids: frozenset[int],
    suppressed: frozenset[int],
    start: Tokens,
    lengths: LengthLimits,
    prefixes: Sequence[Tokens],
    sequence_bias: Sequence[Sequence[Phrase]] | None = None,
    user_processors: Iterable[LogitsProcessor] = (),
) -> list[LogitsProcessor]:
    """Return the logits processors of a batch, in the order in which they apply.

    Phrases that are favored, and tokens that the model cannot generate, change the distribution of the model: beam
    search normalizes after them.
    """
    processors: list[LogitsProcessor] = []
    user_processors, is_beam_search = list(user_processors), config.method == "beam"
    if sequence_bias is not None and config.sequence_bias_strength:
        processors.append(SequenceBias(sequence_bias, config.sequence_bias_strength))
    if suppressed:
        processors.append(SuppressTokens(suppressed))
    if is_beam_search:
        processors.append(normalize)
    if config.repetition_penalty != 1.0:
        processors.append(RepetitionPenalty(config.repetition_penalty, start))
    if config.suppress_tokens:
        processors.append(SuppressTokens(config.suppress_tokens))
    if config.begin_suppress_tokens:
        processors.append(SuppressAtBegin(config.begin_suppress_tokens, prefixes))
    has_minimum = lengths.unit_ranges is not None or any(
        limits.minimum > len(prefix) for limits, prefix in zip(lengths.ranges, prefixes, strict=True)
    )
    # If every other token is suppressed, outputs may end.
    if has_minimum and len(end_ids.union(suppressed, config.suppress_tokens)) < vocab_size:
        processors.append(MinLength(lengths, end_ids))
    if config.no_repeat_ngram_size:
        processors.append(NoRepeatNGram(config.no_repeat_ngram_size))
    processors += user_processors
    if is_beam_search and eos_id is not None and len(end_ids) > 1:
        processors.append(StopTokens(end_ids - {eos_id}, eos_id))
    if is_beam_search and user_processors:
        processors.append(limit_to_zero)
    return processors


class RepetitionPenalty:
    """Lower the logits of tokens in the history (Keskar et al., 2019, section 4.1).

    Positive logits are divided by the penalty. Negative ones are multiplied, since dividing would raise them; the paper
    leaves that case open. The start tokens of an encoder-decoder count as earlier tokens, as in Hugging Face.
    """

    def __init__(self, penalty: float, start: Tokens = ()) -> None:
        self.penalty, self.start = penalty, start

    def __call__(self, histories: Histories, logits: Array) -> Array:
        """Return the changed logits."""
        seen = _token_mask([[*self.start, *history] for history in histories], logits)
        if seen is None:
            return logits
        xp = array_namespace(logits)
        return xp.where(seen, xp.where(logits > 0.0, logits / self.penalty, logits * self.penalty), logits)


class SequenceBias:
    """Raise the logits of tokens that begin or continue a favored phrase (sequence_bias.py)."""

    def __init__(self, phrases: Sequence[Sequence[Phrase]], strength: float) -> None:
        self.phrases, self.strength = phrases, strength

    def __call__(self, histories: Histories, logits: Array) -> Array:
        """Return the changed logits."""
        weights = [
            phrase_weights(self.phrases[index], history)
            for history, index in zip(histories, histories.input_indices, strict=True)
        ]
        if not any(weights):
            return logits
        bias = np.zeros(tuple(logits.shape), dtype=np.float32)
        for row, by_token in enumerate(weights):
            for token, weight in by_token.items():
                bias[row, token] = self.strength * weight
        return logits + from_host(array_namespace(logits), bias, dtype=logits.dtype, device=device(logits))


class SuppressTokens:
    """Mask tokens in all rows."""

    def __init__(self, tokens: Iterable[int]) -> None:
        self.tokens = sorted(tokens)
        self._mask: Any = None  # on the device, from the first step on

    def __call__(self, histories: Histories, logits: Array) -> Array:
        """Return the changed logits."""
        if self._mask is None:
            self._mask = _token_mask([self.tokens], logits)
        return logits if self._mask is None else array_namespace(logits).where(self._mask, -math.inf, logits)


class SuppressAtBegin:
    """Mask tokens at the first position after the prompt or prefix."""

    def __init__(self, tokens: Iterable[int], prefixes: Sequence[Tokens]) -> None:
        self.tokens, self.prefixes = sorted(tokens), prefixes

    def __call__(self, histories: Histories, logits: Array) -> Array:
        """Return the changed logits."""
        rows = zip(histories, histories.input_indices, strict=True)
        return mask_tokens(
            logits, [self.tokens if len(history) == len(self.prefixes[index]) else () for history, index in rows]
        )


class StopTokens:
    """Let further tokens end a beam: eos gets the largest of their log-probabilities, and they are masked."""

    def __init__(self, tokens: Iterable[int], eos_id: int) -> None:
        self.tokens, self.eos_id = sorted(tokens), eos_id

    def __call__(self, histories: Histories, logits: Array) -> Array:
        """Return the changed logits."""
        xp = array_namespace(logits)
        ids = from_host(xp, [self.eos_id, *self.tokens], device=device(logits))
        largest = xp.max(xp.take(logits, ids, axis=1), axis=1, keepdims=True)
        masked = mask_tokens(logits, [self.tokens] * logits.shape[0])
        is_eos = from_host(xp, np.arange(logits.shape[-1])[None, :] == self.eos_id, device=device(logits))
        return xp.where(is_eos, largest, masked)


class MinLength:
    """Mask the tokens that end an output in rows that are shorter than their minimum length."""

    def __init__(self, lengths: LengthLimits, end_ids: Iterable[int]) -> None:
        self.lengths, self.end_ids = lengths, sorted(end_ids)

    def __call__(self, histories: Histories, logits: Array) -> Array:
        """Return the changed logits."""
        rows = zip(histories, histories.input_indices, strict=True)
        return mask_tokens(
            logits, [() if self.lengths.may_end(index, history) else self.end_ids for history, index in rows]
        )


class NoRepeatNGram:
    """Mask tokens that would repeat an n-gram of the history (Paulus et al., 2018).

    Rows in which no token would be left stay as they are.
    """

    def __init__(self, size: int) -> None:
        self.size = size

    def __call__(self, histories: Histories, logits: Array) -> Array:
        """Return the changed logits."""
        masked = mask_tokens(logits, [repeating_tokens(history, self.size) for history in histories])
        if masked is logits:
            return logits
        xp = array_namespace(logits)
        return xp.where(xp.max(masked, axis=-1, keepdims=True) > -math.inf, masked, logits)


def normalize(histories: Histories, logits: Array) -> Array:
    """Return log-probabilities."""
    return logits - log_sum_exp(logits)


def limit_to_zero(histories: Histories, log_probs: Array) -> Array:
    """Shift rows with a log-probability above zero so that their largest is zero."""
    xp = array_namespace(log_probs)
    top = xp.max(log_probs, axis=-1, keepdims=True)
    return log_probs - xp.where(top > 0.0, top, 0.0)


def mask_tokens(logits: Array, tokens: Sequence[Iterable[int]]) -> Array:
    """Set the logits of some tokens to -inf.

    Args:
        logits: (rows, vocabulary).
        tokens: Token ids of each row; a single entry applies to all rows.

    Returns:
        Logits of that shape; the same array if there are no tokens.
    """
    mask = _token_mask(tokens, logits)
    return logits if mask is None else array_namespace(logits).where(mask, -math.inf, logits)


def repeating_tokens(history: Tokens, size: int) -> set[int]:
    """Return the tokens that would complete an n-gram of this size that the history already contains.

    >>> repeating_tokens([1, 2, 3, 1, 2], 3)
    {3}
    """
    context = tuple(history[len(history) - size + 1 :]) if size > 1 else ()
    if len(context) < size - 1:
        return set()
    return {history[end] for end in range(size - 1, len(history)) if tuple(history[end - size + 1 : end]) == context}


def log_sum_exp(logits: Array) -> Array:
    """Return the log of the sum of exponentials over the vocabulary: (rows, vocabulary) -> (rows, 1).

    It is at least the largest logit, in floating point too, so log-probabilities are never above zero.
    """
    xp = array_namespace(logits)
    top = xp.max(logits, axis=-1, keepdims=True)
    return top + xp.log(xp.sum(xp.exp(logits - top), axis=-1, keepdims=True, dtype=logits.dtype))


def _token_mask(tokens: Sequence[Iterable[int]], logits: Array) -> Any:
    """Return a mask (len(tokens), vocabulary) on the device, True at each row's tokens; None without tokens."""
    positions = [(row, token) for row, ids in enumerate(tokens) for token in ids]
    if not positions:
        return None
    mask = np.zeros((len(tokens), logits.shape[-1]), dtype=np.bool_)
    mask[tuple(map(list, zip(*positions, strict=True)))] = True
    return from_host(array_namespace(logits), mask, device=device(logits))
