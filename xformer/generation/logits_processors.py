"""What changes logits before they become probabilities.

All functions take logits (rows, vocabulary) and return new ones; scores are thus log-probabilities of the changed
distribution. What they depend on, the tokens of each row so far, is on the host, so nothing here waits for a GPU:
masks are built on the host and moved over once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from xformer.backends import Array, accumulation_dtype, array_namespace, device, from_host, resolve
from xformer.generation.task import DecodingTask
from xformer.generation.topic import weights_of_rows

Tokens = Sequence[int]


def process(task: DecodingTask, logits: Array, histories: Sequence[Tokens], sentences: Sequence[int]) -> Array:
    """Do to the logits all that the task asks for.

    histories, sentences: the tokens so far and the sentence of each row. Some token is always left: where everything
    would be forbidden, n-gram blocks give way first, then the minimum length.
    """
    options, xp = task.options, array_namespace(logits)
    logits = xp.astype(logits, accumulation_dtype(xp, logits.dtype), copy=False)
    vocabulary = int(logits.shape[-1])
    if options.repetition_penalty != 1.0:
        logits = penalize_repetition(logits, histories, options.repetition_penalty)
    if task.foci is not None and options.topic_strength:
        logits = favor(logits, weights_of_rows(task.foci, histories, sentences), options.topic_strength)
    logits = forbid(logits, task.never)
    closed = task.closed
    # A vocabulary of nothing but special tokens cannot wait for a minimum length.
    early = [
        len(closed) < vocabulary and not task.may_end(sentence, history)
        for history, sentence in zip(histories, sentences, strict=True)
    ]
    if task.eos_id is not None and any(early):
        logits = forbid_end(logits, early, task.eos_id)
    if options.no_repeat_ngram_size:
        blocked = [repeating_tokens(history, options.no_repeat_ngram_size) for history in histories]
        for row, tokens in enumerate(blocked):
            if len(tokens | (closed if early[row] else task.never)) >= vocabulary:
                tokens.clear()
        logits = forbid_in_rows(logits, blocked)
    forced = [forced_token(task.prefixes[s], history) for history, s in zip(histories, sentences, strict=True)]
    return force(logits, forced) if any(token is not None for token in forced) else logits


def forbid(logits: Array, tokens: Iterable[int]) -> Array:
    """Forbid tokens in all rows."""
    return forbid_in_rows(logits, [tokens])


def forbid_in_rows(logits: Array, tokens: Sequence[Iterable[int]]) -> Array:
    """Forbid in each row its own tokens; one entry stands for all rows."""
    hit = _marked(tokens, logits)
    return logits if hit is None else array_namespace(logits).where(hit, -math.inf, logits)


def forbid_end(logits: Array, rows: Sequence[bool], eos_id: int) -> Array:
    """Forbid the end in the rows that are True."""
    return forbid_in_rows(logits, [(eos_id,) if row else () for row in rows])


def repeating_tokens(history: Tokens, size: int) -> set[int]:
    """The tokens that would complete an n-gram of this size that the history has already (Paulus et al., 2018).

    >>> repeating_tokens([1, 2, 3, 1, 2], 3)
    {3}
    """
    context = tuple(history[len(history) - size + 1 :]) if size > 1 else ()
    if len(context) < size - 1:
        return set()
    return {history[end] for end in range(size - 1, len(history)) if tuple(history[end - size + 1 : end]) == context}


def penalize_repetition(logits: Array, histories: Sequence[Tokens], penalty: float) -> Array:
    """Make tokens of the history less probable (Keskar et al., 2019, section 4.1).

    Their logits are divided by the penalty. A negative logit is multiplied instead, since dividing would raise it;
    the paper leaves that case open.
    """
    seen = _marked(histories, logits)
    if seen is None:
        return logits
    xp = array_namespace(logits)
    return xp.where(seen, xp.where(logits > 0.0, logits / penalty, logits * penalty), logits)


def favor(logits: Array, weights: Sequence[dict[int, float]], strength: float) -> Array:
    """Add to the logits of each row's tokens the strength times their weights."""
    if not any(weights):
        return logits
    host, xp = resolve("numpy"), array_namespace(logits)
    bias = host.zeros(tuple(logits.shape), dtype=host.float32)
    for row, wanted in enumerate(weights):
        for token, weight in wanted.items():
            bias[row, token] = strength * weight
    return logits + from_host(xp, bias, dtype=logits.dtype, device=device(logits))


def forced_token(prefix: Tokens, history: Tokens) -> int | None:
    """The token that has to follow, if the prefix goes beyond the history."""
    return prefix[len(history)] if len(history) < len(prefix) else None


def force(logits: Array, tokens: Sequence[int | None]) -> Array:
    """Make one token certain in the rows that have one, whatever was forbidden."""
    host, xp = resolve("numpy"), array_namespace(logits)
    wanted = host.asarray([[-1 if token is None else token] for token in tokens], dtype=host.int64)
    hit = wanted == host.expand_dims(host.arange(logits.shape[-1], dtype=host.int64), axis=0)
    certain = from_host(xp, host.where(hit, 0.0, -math.inf), dtype=logits.dtype, device=device(logits))
    return xp.where(from_host(xp, wanted >= 0, device=device(logits)), certain, logits)


def _marked(tokens: Sequence[Iterable[int]], logits: Array) -> Any:
    """True at each row's tokens, where the logits live: (len(tokens), vocabulary); None if there are none."""
    host, xp = resolve("numpy"), array_namespace(logits)
    places = [(row, token) for row, ids in enumerate(tokens) for token in ids]
    if not places:
        return None
    hit = host.zeros((len(tokens), logits.shape[-1]), dtype=host.bool)
    hit[tuple(map(list, zip(*places, strict=True)))] = True
    return from_host(xp, hit, device=device(logits))


def log_sum_exp(logits: Array) -> Array:
    """The logarithm of the sum of exponentials over the vocabulary: (rows, vocabulary) -> (rows, 1).

    It is at least the largest logit, in floating point too, so log-probabilities are never above zero.
    """
    xp = array_namespace(logits)
    top = xp.max(logits, axis=-1, keepdims=True)
    return top + xp.log(xp.sum(xp.exp(logits - top), axis=-1, keepdims=True, dtype=logits.dtype))
