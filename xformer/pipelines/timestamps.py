"""Timestamps of Whisper: the rules of its tokens, segments, and the alignment of words (Radford et al., 2023)."""

from __future__ import annotations

import itertools
import statistics
import string
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from xformer.backends import Array, array_namespace, device
from xformer.generation.processors import Rows
from xformer.pipelines.transcript import Word
from xformer.tokenizers.streaming import DecodeStream

WITHOUT_SPACES = ("zh", "ja", "th", "lo", "my", "yue")  # languages that are written without spaces between words
_MEDIAN_WIDTH = 7  # of the filter over positions
# Marks that belong to the word after them, marks that belong to the word before them, and ends of sentences.
_OPENING, _CLOSING = "\"'“¡¿([{-", "\"'.。,，!！?？:：”)]}、"  # noqa: RUF001
_SENTENCE_ENDS = ".。!！?？"  # noqa: RUF001
_MAX_MEDIAN = 35  # positions: 0.7 seconds


class TimestampRules:
    """Mask the tokens that may not follow in an output with timestamps, as a logits processor (section 4.5).

    An output begins with a timestamp. Others come in pairs, the end of a segment and the start of the next one, or
    before eos alone; times never decrease, and a segment has a positive duration. If all timestamps together are more
    probable than the best other token, the next token is a timestamp.

    Args:
        first_id: Id of the timestamp 0; ids of later ones follow, and the one before it asks for no timestamps.
        eos_id: Id of eos; special tokens follow it.
        max_initial: Largest timestamp at the start of an output, counted from 0.
    """

    def __init__(self, first_id: int, eos_id: int, max_initial: int) -> None:
        self.first_id, self.eos_id, self.max_initial = first_id, eos_id, max_initial

    def __call__(self, tokens: Array, lengths: Array, logits: Array, rows: Rows) -> Array:
        """Return the changed logits."""
        xp, vocab_size, starts = array_namespace(logits), logits.shape[-1], rows.starts.tolist()
        options = {"dtype": xp.index_dtype, "device": device(logits)}
        limits = [self._limits(rows.history(row)[start:], vocab_size) for row, start in enumerate(starts)]
        text, first, last = (xp.from_host(np.asarray(x)[:, None], **options) for x in zip(*limits, strict=True))
        ids = xp.arange(vocab_size, **options)[None, :]
        is_text = ids < self.first_id
        allowed = xp.where(is_text, (ids >= text) & (ids != self.first_id - 1), (ids >= first) & (ids <= last))
        logits = xp.where(allowed, logits, -float("inf"))
        weights = xp.exp(logits - xp.max(logits, axis=-1, keepdims=True))
        timestamps = xp.sum(xp.where(is_text, 0.0, weights), axis=-1, keepdims=True)
        best_text = xp.max(xp.where(is_text, weights, 0.0), axis=-1, keepdims=True)
        return xp.where(is_text & (timestamps > best_text), -float("inf"), logits)

    def _limits(self, output: Sequence[int], end: int) -> tuple[int, int, int]:
        """Return the first token of text, and the first and last timestamp that may follow."""
        if not output:
            return self.first_id, self.first_id, self.first_id + self.max_initial
        last = next((token for token in reversed(output) if token >= self.first_id), self.first_id - 1)
        if output[-1] < self.first_id:
            return 0, last + 1, end
        if len(output) > 1 and output[-2] < self.first_id:  # the end of a segment
            return self.eos_id, last, end
        return 0, end, end


class TokenSegment(NamedTuple):
    """Tokens between two timestamps, which count positions of the encoder; the end of the last one may be missing."""

    start: int
    end: int
    tokens: list[int]


def split_segments(
    tokens: Sequence[int], first_id: int, eos_id: int, num_positions: int
) -> tuple[list[TokenSegment], int]:
    """Split the output for a window into segments.

    Args:
        tokens: Tokens, beginning with a timestamp.
        first_id: Id of the timestamp 0.
        eos_id: Id of eos, the first special token.
        num_positions: Positions of the audio in the window.

    Returns:
        The segments, and the position where the next window begins: after the last complete segment if another one
        follows it, which may continue in the next window; else the end of this window.
    """
    if not tokens:
        return [], num_positions
    is_time = [token >= first_id for token in tokens]
    cuts = [i for i in range(1, len(tokens)) if is_time[i - 1] and is_time[i]]
    next_position = num_positions
    if not cuts or is_time[-2:] == [False, True]:
        cuts.append(len(tokens))
    else:
        next_position = tokens[cuts[-1] - 1] - first_id
    segments = []
    for start, end in itertools.pairwise([0, *cuts]):
        times = [token - first_id for token in tokens[start:end] if token >= first_id]
        text = [token for token in tokens[start:end] if token < eos_id]
        segments.append(TokenSegment(times[0], times[-1] if len(times) > 1 else num_positions, text))
    return segments, next_position


# --- Words ------------------------------------------------------------------------------------------------------------


def align(weights: Any, start: int, end: int | None = None) -> Any:
    """Return the position at which each token begins, for the tokens `start` to `end` (exclusive).

    The weights of each token are divided by their sum, those of each position normalized over all tokens, smoothed by
    a median filter over positions, and averaged over heads. Dynamic time warping (Sakoe and Chiba, 1978) then finds the
    best path from the first position of the first token to the last position of the last one.

    Args:
        weights: Attention weights (heads, tokens, positions), of the positions with audio alone.
        start: First token to align.
        end: Token after the last one; default all.
    """
    x = np.asarray(weights, dtype=np.float64)
    x = x / np.maximum(x.sum(axis=2, keepdims=True), 1e-300)
    deviation = x.std(axis=1, keepdims=True)
    x = (x - x.mean(axis=1, keepdims=True)) / np.where(deviation > 0.0, deviation, 1.0)
    x, half = x[:, start:end], _MEDIAN_WIDTH // 2
    if x.shape[2] > half:
        padded = np.pad(x, ((0, 0), (0, 0), (half, half)), mode="reflect")
        x = np.sort(np.lib.stride_tricks.sliding_window_view(padded, _MEDIAN_WIDTH, axis=2), axis=-1)[..., half]
    return _warp(-np.mean(x, axis=0))


def _warp(costs: Any) -> Any:
    """Return the first column of each row on the cheapest path through a matrix, from its first to its last element."""
    rows, columns = costs.shape
    totals = np.full((rows + 1, columns + 1), np.inf)
    totals[0, 0] = 0.0
    for row, x in enumerate(costs):
        sums = np.cumsum(x)
        entered = np.minimum(totals[row, :-1], totals[row, 1:])  # from the row before
        totals[row + 1, 1:] = sums + np.minimum.accumulate(entered - (sums - x))
    starts, row, column = np.zeros(rows, np.int64), rows, columns
    while row > 0:
        starts[row - 1] = column - 1
        both, up, left = totals[row - 1, column - 1], totals[row - 1, column], totals[row, column - 1]
        if left <= min(both, up):
            column -= 1
        elif both <= up:
            row, column = row - 1, column - 1
        else:
            row -= 1
    return starts


def timed_words(
    parts: Iterable[TokenSegment],
    weights: Any,
    first: int,
    probabilities: Sequence[float],
    decode: Callable[[list[int]], str],
    *,
    has_spaces: bool,
) -> list[list[Word]]:
    """Return the words of each segment, with positions of the encoder as times.

    Args:
        parts: The segments.
        weights: Attention weights of an output with eos, as for `align`.
        first: Its first token that belongs to a segment.
        probabilities: Probability of each token of the segments.
        decode: As for `split_words`.
        has_spaces: As for `split_words`.
    """
    starts = align(weights, first, -1).tolist()  # of the tokens, and of eos
    words, ends, position = [], [], 0
    for part in parts:
        for text, count in split_words(part.tokens, decode, has_spaces=has_spaces):
            end = position + count
            words.append(Word(text, starts[position], starts[end], sum(probabilities[position:end]) / count))
            position = end
        ends.append(len(words))
    words = shorten_pauses(words)
    return [merge_punctuation(words[first:last]) for first, last in itertools.pairwise([0, *ends])]


def split_words(
    tokens: Sequence[int], decode: Callable[[list[int]], str], *, has_spaces: bool = True
) -> list[tuple[str, int]]:
    """Return the words of a text, with the number of their tokens; punctuation marks are words, too.

    Args:
        tokens: Tokens of the text.
        decode: Function from tokens to text.
        has_spaces: False: each character is a word.
    """
    words: list[tuple[str, int]] = []
    for piece, count in _pieces(tokens, decode):
        if not words or not has_spaces or piece.startswith(" ") or piece.strip() in string.punctuation:
            words.append((piece, count))
        else:
            words[-1] = words[-1][0] + piece, words[-1][1] + count
    return words


def _pieces(tokens: Iterable[int], decode: Callable[[list[int]], str]) -> Iterator[tuple[str, int]]:
    """Yield parts of a text of whole characters, with the number of their tokens."""
    stream, count = DecodeStream(decode), 0
    for token in tokens:
        count += 1
        if piece := stream.step(token):
            yield piece, count
            count = 0
    if count:
        yield stream.finish(), count


def shorten_pauses(words: Sequence[Word]) -> list[Word]:
    """Shorten words at sentence boundaries to twice the median duration."""
    durations = [word.end - word.start for word in words if word.end > word.start]
    longest = 2.0 * min(_MAX_MEDIAN, statistics.median(durations or [0.0]))
    shortened = []
    for before, word in zip([None, *words], words, strict=False):
        if word.end - word.start > longest and word.text in _SENTENCE_ENDS:
            word = word._replace(end=word.start + longest)
        elif word.end - word.start > longest and (before is None or before.text in _SENTENCE_ENDS):
            word = word._replace(start=word.end - longest)
        shortened.append(word)
    return shortened


def merge_punctuation(words: Iterable[Word]) -> list[Word]:
    """Join punctuation marks with the word that they belong to."""
    merged: list[Word] = []
    is_opening = False
    for word in words:
        opens = word.text.startswith(" ") and word.text.strip() in _OPENING
        if is_opening:
            merged[-1] = word._replace(text=merged[-1].text + word.text, start=merged[-1].start)
        elif merged and word.text in _CLOSING and not merged[-1].text.endswith(" "):
            merged[-1] = merged[-1]._replace(text=merged[-1].text + word.text, end=word.end)
        else:
            merged.append(word)
        is_opening = opens
    return merged
