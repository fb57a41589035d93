"""The largest scores of rows, and the logarithm of their sum of exponentials. None has a derivative."""

from __future__ import annotations

from typing import Any

import numpy as np

from xformer.backends import Array, array_namespace, extra
from xformer.config import check_count
from xformer.ops.operation import Operation


def _logsumexp(x: Array, *, save: bool) -> tuple[tuple[Array, Array], Any]:
    """Return the largest element, and the logarithm of the sum of exponentials relative to it."""
    xp = array_namespace(x)
    top = xp.max(x, axis=-1, keepdims=True)
    return (top, xp.log(xp.sum(xp.exp(x - top), axis=-1, keepdims=True, dtype=x.dtype))), None


def _top_k(x: Array, *, k: int, save: bool) -> tuple[tuple[Array, Array], Any]:
    return extra.top_k(x, k), None


def _best(x: Array, *, save: bool) -> tuple[Array, Any]:
    xp = array_namespace(x)
    log_probs = log_softmax(x, xp.max(x, axis=-1, keepdims=True))
    return xp.concat([xp.astype(xp.argmax(x, axis=-1, keepdims=True), x.dtype), log_probs], axis=-1), None


_BEST = Operation("best", "x: (rows, n) float -> (rows, 2)", _best, None)
_LOGSUMEXP = Operation(
    "logsumexp", "x: (..., n) float -> (..., 1), (..., 1)", _logsumexp, None, conditions={"n > 0": lambda s: s["n"] > 0}
)
_TOP_K = Operation("top_k", "x: (..., n) float -> (..., k)", _top_k, None)


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


def best(x: Array) -> Array:
    """Return the index of the largest element of each row, the first of equal ones, and the logarithm of its softmax.

    Args:
        x: Array of shape (rows, n), float32 or wider, n at least 1 and below 2**24, whose numbers are exact there.

    Returns:
        Array of shape (rows, 2). The logarithm is NaN in rows without a finite element. It has no derivative.
    """
    return _BEST(x)


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
