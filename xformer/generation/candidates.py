"""The best continuations of a beam's hypotheses."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from xformer.backends import Array, array_namespace, extra, resolve, to_host
from xformer.generation.logits_processors import log_sum_exp


class Candidate(NamedTuple):
    """One more token for a live hypothesis. place: the hypothesis among those of its group."""

    log_probability: float  # of the whole, this token included
    place: int
    token: int


class Continuations(NamedTuple):
    """The best tokens of each row, on the host, as NumPy arrays.

    tokens, gains: (rows, n), best first, with their log-probabilities; ends: (rows,) that of eos, or None.
    """

    tokens: Any
    gains: Any
    ends: Any


def continuations(logits: Array, count: int, eos_id: int | None) -> Continuations:
    """Read the `count` best tokens of each row of logits (rows, vocabulary)."""
    xp = array_namespace(logits)
    values, tokens = extra.top_k(logits, min(count, int(logits.shape[-1])))
    normalizer = log_sum_exp(logits)
    ends = None if eos_id is None else logits[:, eos_id : eos_id + 1] - normalizer
    gains = values - normalizer if ends is None else xp.concat([values - normalizer, ends], axis=-1)
    # The first read waits for the step; the second finds its work done.
    host_tokens, host_gains = to_host(tokens), to_host(gains).astype("float64")
    if ends is None:
        return Continuations(host_tokens, host_gains, None)
    return Continuations(host_tokens, host_gains[:, :-1], host_gains[:, -1])


def ranked(
    found: Continuations, totals: Sequence[Sequence[float]], rows: Sequence[Sequence[int]], count: int
) -> list[list[Candidate]]:
    """The `count` best candidates of each group, best first; equal ones in the order of places, then of tokens' ranks.

    totals, rows: the log-probability and the row of each live hypothesis of each group; groups may differ in size.
    """
    host = resolve("numpy")
    width, best = max(map(len, rows)), found.tokens.shape[1]
    filled_rows = host.asarray([[*places, *[0] * (width - len(places))] for places in rows], dtype=host.int64)
    filled = [[*given, *[-math.inf] * (width - len(given))] for given in totals]
    scores = host.asarray(filled, dtype=host.float64)[:, :, None] + found.gains[filled_rows]  # (groups, places, n)
    scores = host.reshape(scores, (len(rows), width * best))
    order = host.argsort(-scores, axis=-1, stable=True)[:, :count]
    chosen = host.take_along_axis(scores, order, axis=-1)
    tokens = host.take_along_axis(host.reshape(found.tokens[filled_rows], (len(rows), width * best)), order, axis=-1)
    return [
        [
            Candidate(total, position // best, token)
            for total, position, token in zip(*columns, strict=True)
            if total > -math.inf
        ]
        for columns in zip(chosen.tolist(), order.tolist(), tokens.tolist(), strict=True)
    ]
