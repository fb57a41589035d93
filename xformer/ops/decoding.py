"""The largest scores of rows, the logarithm of their sum of exponentials, and the choice of a token among them.

None has a derivative. Sampling divides logits by the temperature, truncates them, and inverts the cumulative
distribution at uniform random numbers.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from xformer.backends import Array, array_namespace, extra
from xformer.config import check_count
from xformer.ops.operation import Operation
from xformer.ops.softmax import softmax


def _logsumexp(x: Array, *, save: bool) -> tuple[tuple[Array, Array], Any]:
    """Return the largest element, and the logarithm of the sum of exponentials relative to it."""
    xp = array_namespace(x)
    top = xp.max(x, axis=-1, keepdims=True)
    return (top, xp.log(xp.sum(xp.exp(x - top), axis=-1, keepdims=True, dtype=x.dtype))), None


def _choose(
    logits: Array,
    uniforms: Array | None,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    save: bool,
) -> tuple[Array, Any]:
    xp = array_namespace(logits)
    if uniforms is None:
        chosen = xp.argmax(logits, axis=-1, keepdims=True)
    else:
        kept = truncate(logits, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
        chosen = xp.expand_dims(draw(kept, uniforms), axis=-1)
    log_probs = log_softmax(logits, xp.take_along_axis(logits, chosen, axis=-1))
    return xp.concat([xp.astype(chosen, log_probs.dtype), log_probs], axis=-1), None


_CHOOSE = Operation("choose", "logits: (rows, n) float, uniforms?: (rows) float[0, inf) -> (rows, 2)", _choose, None)
_LOGSUMEXP = Operation(
    "logsumexp", "x: (..., n) float -> (..., 1), (..., 1)", _logsumexp, None, conditions={"n > 0": lambda s: s["n"] > 0}
)
_TOP_K = Operation("top_k", "x: (..., n) float -> (..., k)", lambda x, *, k, save: (extra.top_k(x, k), None), None)


def logsumexp(x: Array) -> Array:
    """Return the logarithm of the sum of exponentials over the last axis.

    It is at least the largest element, in floating point too, so log-probabilities are never above zero. It has no
    derivative.

    Args:
        x: Array of shape (..., n), floating, n at least 1.

    Returns:
        Array of shape (..., 1).

    Raises:
        ShapeError: If n is 0.
        DifferentiationError: If `x` is to be differentiated.
    """
    top, log_total = _LOGSUMEXP(x)
    return top + log_total


@np.errstate(invalid="ignore")
def log_softmax(x: Array, scores: Array | None = None) -> Array:
    """Return the logarithm of the softmax over the last axis, NaN in rows without a finite element.

    It is at most zero, and large elements do not round the logarithm of the sum away. It has no derivative.

    Args:
        x: Array of shape (..., n), floating, n at least 1.
        scores: Elements of `x` whose logarithms are wanted, of shape (..., k); default all of them.
    """
    top, log_total = _LOGSUMEXP(x)
    return ((x if scores is None else scores) - top) - log_total


def choose(logits: Array, uniforms: Array | None = None, **settings: Any) -> Array:
    """Return a token of each row and its log-probability among all of them.

    Args:
        logits: Array of shape (rows, n), float32 or wider, n at least 1 and below 2**24, whose numbers are exact there.
        uniforms: Random numbers in [0, 1), (rows,), of the dtype of the logits; see `draw`. None: the most probable
            token is chosen, the first of equal ones, and there are no settings.
        **settings: All options of `truncate`.

    Returns:
        Array of shape (rows, 2). The logarithm is NaN in rows without a finite logit. It has no derivative.
    """
    return _CHOOSE(logits, uniforms, **settings)


def is_native(logits: Array) -> bool:
    """Return whether the native library computes `choose`."""
    xp, arrays = array_namespace(logits), (logits, None)
    return _CHOOSE.select(xp, arrays, {}, _CHOOSE.check(*arrays), save=False).name == "native.choose"


GREEDY: dict[str, Any] = {"min_p": 1.0}  # only the most probable tokens remain


def kernel_settings(
    *, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> tuple[float, ...]:
    """Return the numbers that kernels take."""
    return float(temperature), float(top_k), float(top_p), math.log(min_p) if min_p else -math.inf


def top_k(x: Array, k: int) -> tuple[Array, Array]:
    """Return the k largest values along the last axis and their indices, largest first.

    Of equal values the one with the lower index comes first. They have no derivative.

    Args:
        x: Array of shape (..., n), floating, without NaN.
        k: Number of values, 1 to n.

    Returns:
        Values and indices, each of shape (..., k).

    Raises:
        ConfigError: If k is not an integer of at least 1.
        ShapeError: If k exceeds n.
        DifferentiationError: If `x` is to be differentiated.
    """
    check_count("k", k)
    return _TOP_K(x, k=k)


def truncate(logits: Array, *, temperature: float, top_k: int, top_p: float, min_p: float) -> Array:
    """Divide logits (rows, n) by the temperature, then apply top_k, top_p and min_p, in this order; 1, 0, 1, 0 are off.

    Other tokens get -inf. The most probable token always stays.
    """
    if temperature != 1.0:
        logits = logits / temperature
    if top_k:
        logits = keep_top_k(logits, top_k)
    if top_p < 1.0:
        logits = keep_top_p(logits, top_p)
    return keep_min_p(logits, min_p) if min_p else logits


def keep_top_k(logits: Array, k: int) -> Array:
    """Keep the k largest logits of each row, and those equal to the smallest of them."""
    values, _ = top_k(logits, min(k, int(logits.shape[-1])))
    return array_namespace(logits).where(logits >= values[:, -1:], logits, -math.inf)


def keep_top_p(logits: Array, p: float) -> Array:
    """Keep the smallest set of tokens with at least probability p (nucleus sampling, Holtzman et al., 2020).

    The most probable token is always one of them. Ties with the least probable token are kept.
    """
    xp = array_namespace(logits)
    probabilities = softmax(logits)
    ordered = xp.sort(probabilities, axis=-1, descending=True)
    before = xp.cumulative_sum(ordered, axis=-1) - ordered
    smallest = xp.min(xp.where(before < p, ordered, ordered[:, :1]), axis=-1, keepdims=True)
    return xp.where(probabilities >= smallest, logits, -math.inf)


def keep_min_p(logits: Array, p: float) -> Array:
    """Keep the tokens with at least p times the highest probability (Nguyen et al., 2024)."""
    xp = array_namespace(logits)
    return xp.where(logits >= xp.max(logits, axis=-1, keepdims=True) + math.log(p), logits, -math.inf)


def draw(logits: Array, uniforms: Array) -> Array:
    """Draw one token per row, by inverting the cumulative distribution at that row's uniform number in [0, 1).

    Args:
        logits: (rows, n).
        uniforms: (rows,).

    Returns:
        Token ids (rows,). Tokens of probability zero are never drawn, whatever the rounding.
    """
    xp = array_namespace(logits)
    probabilities = softmax(logits)
    # Parallel sums may be uneven by a rounding error, so a token's own probability has to be above zero as well.
    cumulative = xp.where(probabilities > 0.0, xp.cumulative_sum(probabilities, axis=-1), -1.0)
    largest = 1.0 - 0.5 * float(xp.finfo(logits.dtype).eps)  # below 1 in this dtype too
    thresholds = xp.where(uniforms < largest, uniforms, largest)[:, None]
    reached = cumulative > thresholds * xp.max(cumulative, axis=-1, keepdims=True)
    return xp.argmax(xp.astype(reached, xp.int32), axis=-1)  # the first
