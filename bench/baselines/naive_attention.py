"""Textbook attention in plain NumPy: the scores of all queries and keys at once, with a hand-written gradient."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from xformer.benchmarks.computation import Computation, fingerprint
from xformer.benchmarks.parts import gradient_of, inputs_of, mask_of


def softmax(scores: Any) -> Any:
    """Compute the softmax over the last axis."""
    exponentials = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return exponentials / exponentials.sum(axis=-1, keepdims=True)


def attention(query: Any, key: Any, value: Any, mask: Any = None) -> tuple[Any, Any]:
    """Return the output and the weights; inputs are (batch, heads, length, head_dim), mask: True = may attend."""
    scores = query @ key.swapaxes(-1, -2) / np.float32(math.sqrt(query.shape[-1]))
    if mask is not None:
        scores = np.where(mask, scores, np.float32(-np.inf))
    weights = softmax(scores)
    return weights @ value, weights


def gradients(query: Any, key: Any, value: Any, weights: Any, gradient: Any) -> tuple[Any, Any, Any]:
    """Return the gradients of query, key and value."""
    dvalue = weights.swapaxes(-1, -2) @ gradient
    dweights = gradient @ value.swapaxes(-1, -2)
    dscores = weights * (dweights - (dweights * weights).sum(axis=-1, keepdims=True))
    dscores = dscores / np.float32(math.sqrt(query.shape[-1]))
    return dscores @ key, dscores.swapaxes(-1, -2) @ query, dvalue


def build(settings: dict[str, Any]) -> Computation:
    """Build attention, forward or forward and backward."""
    (query, key, value), mask = inputs_of(settings, 3), mask_of(settings)
    if settings["causal"]:
        earlier = np.tri(settings["length"], dtype=bool)
        mask = earlier if mask is None else mask & earlier

    def step(index: int) -> tuple[Any, ...]:
        out, weights = attention(query, key, value, mask)
        if not settings["backward"]:
            return (out,)
        return (out, *gradients(query, key, value, weights, gradient_of(query.shape)))

    return Computation(step, fingerprint)
