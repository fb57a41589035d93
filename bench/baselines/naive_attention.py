"""Attention as textbooks write it, in plain NumPy: the scores of all queries and keys at once, nothing reused.

What anyone would write first, with its gradient derived by hand; the yardstick for what a kernel gains.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from xformer.benchmarks import Work
from xformer.benchmarks.attention import inputs
from xformer.benchmarks.workload import digest


def softmax(scores: Any) -> Any:
    """Over the last axis, shifted by the largest score so that exp cannot overflow."""
    exponentials = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return exponentials / exponentials.sum(axis=-1, keepdims=True)


def attention(query: Any, key: Any, value: Any, mask: Any = None) -> tuple[Any, Any]:
    """Attend; (batch, heads, length, head_dim) each. mask: True = may attend. Returns the output and the weights."""
    scores = query @ key.swapaxes(-1, -2) / np.float32(math.sqrt(query.shape[-1]))
    if mask is not None:
        scores = np.where(mask, scores, np.float32(-np.inf))
    weights = softmax(scores)
    return weights @ value, weights


def gradients(query: Any, key: Any, value: Any, weights: Any, gradient: Any) -> tuple[Any, Any, Any]:
    """The gradients of query, key and value, given that of the output."""
    dvalue = weights.swapaxes(-1, -2) @ gradient
    dweights = gradient @ value.swapaxes(-1, -2)
    dscores = weights * (dweights - (dweights * weights).sum(axis=-1, keepdims=True))
    dscores = dscores / np.float32(math.sqrt(query.shape[-1]))
    return dscores @ key, dscores.swapaxes(-1, -2) @ query, dvalue


def work(settings: dict[str, Any]) -> Work:
    """The core of attention, forward or forward and backward."""
    given = inputs(settings)
    query, key, value, mask = (given[name] for name in ("query", "key", "value", "mask"))
    if settings["causal"]:
        earlier = np.tri(settings["length"], dtype=bool)
        mask = earlier if mask is None else mask & earlier

    def step(number: int) -> tuple[Any, ...]:
        out, weights = attention(query, key, value, mask)
        if not settings["backward"]:
            return (out,)
        return (out, *gradients(query, key, value, weights, given["gradient"]))

    return Work(step, digest)
