"""The best candidates for extending the beams of a group."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from xformer.backends import Array, array_namespace, extra, to_host


class Candidate(NamedTuple):
    """A beam extended by one token."""

    log_probability: float  # of the whole hypothesis, this token included
    beam: int  # index among the beams of its group
    token: int


class TopTokens(NamedTuple):
    """The best tokens of each row, as NumPy arrays.

    Attributes:
        tokens: (rows, n), best first.
        log_probs: (rows, n).
        eos_log_probs: (rows,), or None without eos.
    """

    tokens: Any
    log_probs: Any
    eos_log_probs: Any


def top_tokens(log_probs: Array, count: int, eos_id: int | None) -> TopTokens:
    """Return the `count` best tokens of each row of log-probabilities (rows, vocabulary)."""
    values, tokens = extra.top_k(log_probs, min(count, int(log_probs.shape[-1])))
    if eos_id is not None:
        values = array_namespace(values).concat([values, log_probs[:, eos_id : eos_id + 1]], axis=-1)
    # The first copy waits for the step; the second one is then immediate.
    host_tokens, host_log_probs = to_host(tokens), to_host(values).astype("float64")
    if eos_id is None:
        return TopTokens(host_tokens, host_log_probs, None)
    return TopTokens(host_tokens, host_log_probs[:, :-1], host_log_probs[:, -1])


def rank_candidates(
    top: TopTokens, totals: Sequence[Sequence[float]], rows: Sequence[Sequence[int]], count: int
) -> list[list[Candidate]]:
    """Return the `count` best candidates of each group, best first; ties are ordered by beam, then by token rank.

    Args:
        top: Best tokens of each row.
        totals: Log-probability of each beam of each group; groups may differ in size.
        rows: Row of each beam of each group.
        count: Candidates per group.
    """
    width, num_tokens = max(map(len, rows)), top.tokens.shape[1]
    padded_rows = np.asarray([[*group, *[0] * (width - len(group))] for group in rows], dtype=np.int64)
    padded = [[*group, *[-math.inf] * (width - len(group))] for group in totals]
    scores = np.asarray(padded, dtype=np.float64)[:, :, None] + top.log_probs[padded_rows]  # (groups, beams, n)
    scores = np.reshape(scores, (len(rows), width * num_tokens))
    order = np.argsort(-scores, axis=-1, stable=True)[:, :count]
    best = np.take_along_axis(scores, order, axis=-1)
    tokens = np.take_along_axis(np.reshape(top.tokens[padded_rows], scores.shape), order, axis=-1)
    return [
        [
            Candidate(total, position // num_tokens, token)
            for total, position, token in zip(*columns, strict=True)
            if total > -math.inf
        ]
        for columns in zip(best.tolist(), order.tolist(), tokens.tolist(), strict=True)
    ]
