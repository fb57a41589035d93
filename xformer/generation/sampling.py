"""Sampling: temperature, truncation, and inverse-transform sampling from uniform random numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence

from xformer.backends import Array, array_namespace, device, extra, from_host
from xformer.generation.config import GenerationConfig
from xformer.ops.softmax import softmax
from xformer.random import Rng

_MIN_TEMPERATURE = 1e-6  # smaller ones would make logits infinite


def truncate(logits: Array, config: GenerationConfig) -> Array:
    """Divide logits (rows, vocabulary) by the temperature, then apply top_k, top_p and min_p, in this order.

    Other tokens get -inf. The most probable token always stays.
    """
    if config.temperature is not None:
        logits = logits / max(config.temperature, _MIN_TEMPERATURE)
    if config.top_k:
        logits = keep_top_k(logits, config.top_k)
    if config.top_p:
        logits = keep_top_p(logits, config.top_p)
    return keep_min_p(logits, config.min_p) if config.min_p else logits


def keep_top_k(logits: Array, k: int) -> Array:
    """Keep the k largest logits of each row, and those equal to the smallest of them."""
    values, _ = extra.top_k(logits, min(k, int(logits.shape[-1])))
    return array_namespace(logits).where(logits >= values[:, -1:], logits, -math.inf)


def keep_top_p(logits: Array, p: float) -> Array:
    """Keep the smallest set of tokens with at least probability p (nucleus sampling, Holtzman et al., 2020).

    Tokens as probable as the least probable one of the set stay, too.
    """
    xp = array_namespace(logits)
    probabilities = softmax(logits)
    ordered = xp.sort(probabilities, axis=-1, descending=True)
    before = xp.cumulative_sum(ordered, axis=-1) - ordered
    smallest = xp.min(xp.where(before < p, ordered, math.inf), axis=-1, keepdims=True)
    return xp.where(probabilities >= smallest, logits, -math.inf)


def keep_min_p(logits: Array, p: float) -> Array:
    """Keep the tokens with at least p times the highest probability (Nguyen et al., 2024)."""
    xp = array_namespace(logits)
    return xp.where(logits >= xp.max(logits, axis=-1, keepdims=True) + math.log(p), logits, -math.inf)


def draw(logits: Array, uniforms: Sequence[float]) -> Array:
    """Draw one token per row, by inverting the cumulative distribution at that row's uniform number in [0, 1).

    Args:
        logits: (rows, vocabulary).
        uniforms: (rows,).

    Returns:
        Token ids (rows,). Tokens of probability zero are never drawn, whatever the rounding.
    """
    xp = array_namespace(logits)
    probabilities = softmax(logits)
    # Parallel sums may be uneven by a rounding error, so a token's own probability has to be above zero as well.
    cumulative = xp.where(probabilities > 0.0, xp.cumulative_sum(probabilities, axis=-1), -1.0)
    largest = 1.0 - 0.5 * float(xp.finfo(logits.dtype).eps)  # below 1 in this dtype too
    thresholds = from_host(
        xp, [[min(uniform, largest)] for uniform in uniforms], dtype=logits.dtype, device=device(logits)
    )
    reached = cumulative > thresholds * xp.max(cumulative, axis=-1, keepdims=True)
    return xp.argmax(xp.astype(reached, xp.int32), axis=-1)  # the first


def uniform_streams(rng: Rng, indices: Sequence[int], samples: int, lengths: Sequence[int]) -> list[list[list[float]]]:
    """Return uniform numbers in [0, 1) by input, sample and position.

    Args:
        rng: Source of all streams.
        indices: Index of each input; an index has the same stream in any batch and for any length.
        samples: Samples per input.
        lengths: Numbers needed for each input.
    """
    return [
        [rng.fold_in("input", index, "sample", sample).uniform((length,)).tolist() for sample in range(samples)]
        for index, length in zip(indices, lengths, strict=True)
    ]
