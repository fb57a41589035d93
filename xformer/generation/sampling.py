"""Drawing tokens: temperature, truncation, and inverse-transform sampling from given uniform numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence

from xformer.backends import Array, array_namespace, device, extra, from_host
from xformer.generation.config import DecodingOptions
from xformer.ops import softmax
from xformer.random import Rng


def truncate(logits: Array, options: DecodingOptions) -> Array:
    """Divide by the temperature, then keep what top_k, top_p and min_p keep, in this order.

    logits: (rows, vocabulary). What is not kept becomes minus infinity; the most probable token always stays.
    """
    if options.temperature is not None:
        logits = logits / options.temperature
    if options.top_k is not None:
        logits = keep_top_k(logits, options.top_k)
    if options.top_p is not None:
        logits = keep_top_p(logits, options.top_p)
    return logits if options.min_p is None else keep_min_p(logits, options.min_p)


def keep_top_k(logits: Array, k: int) -> Array:
    """Keep the k largest logits of each row, and what equals the smallest of them."""
    values, _ = extra.top_k(logits, min(k, int(logits.shape[-1])))
    return array_namespace(logits).where(logits >= values[:, -1:], logits, -math.inf)


def keep_top_p(logits: Array, p: float) -> Array:
    """Keep the smallest set of tokens with at least probability p (nucleus sampling, Holtzman et al., 2020).

    A token as probable as the least one of the set stays with it.
    """
    xp = array_namespace(logits)
    probabilities = softmax(logits)
    ordered = xp.sort(probabilities, axis=-1, descending=True)
    before = xp.cumulative_sum(ordered, axis=-1) - ordered
    least = xp.min(xp.where(before < p, ordered, math.inf), axis=-1, keepdims=True)
    return xp.where(probabilities >= least, logits, -math.inf)


def keep_min_p(logits: Array, p: float) -> Array:
    """Keep the tokens with at least p times the probability of the best one (Nguyen et al., 2024)."""
    xp = array_namespace(logits)
    return xp.where(logits >= xp.max(logits, axis=-1, keepdims=True) + math.log(p), logits, -math.inf)


def draw(logits: Array, uniforms: Sequence[float]) -> Array:
    """Draw one token a row, by inverting the cumulative distribution at that row's uniform number in [0, 1).

    logits: (rows, vocabulary) -> (rows,) ids. A token of probability zero is never drawn, whatever the rounding.
    """
    xp = array_namespace(logits)
    probabilities = softmax(logits)
    # Parallel sums may be uneven by a rounding error, so a token's own probability has to be above zero as well.
    cumulative = xp.where(probabilities > 0.0, xp.cumulative_sum(probabilities, axis=-1), -1.0)
    largest = 1.0 - 0.5 * float(xp.finfo(logits.dtype).eps)  # below 1 in this dtype too
    shares = from_host(xp, [[min(uniform, largest)] for uniform in uniforms], dtype=logits.dtype, device=device(logits))
    reached = cumulative > shares * xp.max(cumulative, axis=-1, keepdims=True)
    return xp.argmax(xp.astype(reached, xp.int32), axis=-1)  # the first


def uniform_streams(rng: Rng, numbers: Sequence[int], samples: int, lengths: Sequence[int]) -> list[list[list[float]]]:
    """Uniform numbers for each sentence, sample and position.

    numbers: what the sentences are called; one number always has the same stream, in any batch and at any length.
    """
    return [
        [rng.fold("sentence", number, "sample", sample).uniform((length,)).tolist() for sample in range(samples)]
        for number, length in zip(numbers, lengths, strict=True)
    ]
