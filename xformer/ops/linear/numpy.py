"""Linear maps on NumPy: one product for all rows, and one for all maps of the same input."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from xformer.ops._numpy import FLOATS
from xformer.ops.linear.definition import as_rows, split_heads
from xformer.ops.operation import Kernel

# Computes a @ b + bias for matrices (rows, k) and (k, columns), which may be transposed views, and a bias (columns,) or
# None.
Affine = Callable[[Any, Any, Any], Any]


def _affine(a: Any, b: Any, bias: Any) -> Any:
    y = a @ b
    if bias is not None:
        y += bias
    return y


# --- linear ----------------------------------------------------------------------------------------------------------


def _forward(x: Any, weight: Any, bias: Any, *, save: bool, affine: Affine) -> tuple[Any, Any]:
    y = affine(as_rows(x), weight, bias)
    return y.reshape(*x.shape[:-1], weight.shape[1]), (x, weight)


def _vjp(g: Any, residuals: Any, needs: Any, *, affine: Affine) -> tuple[Any, ...]:
    x, weight = residuals
    g_rows = as_rows(g)
    dx = affine(g_rows, weight.T, None).reshape(x.shape) if needs[0] else None
    dweight = None
    if needs[1]:
        # The gradient of a transposed view (the tied output layer) has the memory order of the view.
        transposed = weight.flags.f_contiguous
        dweight = affine(g_rows.T, as_rows(x), None).T if transposed else affine(as_rows(x).T, g_rows, None)
    return dx, dweight, (g_rows.sum(axis=0) if needs[2] else None)


# --- project_heads ---------------------------------------------------------------------------------------------------

_MIN_JOINT_ROWS = 96  # with fewer, as in decoding, concatenating the matrices takes longer than it saves


def _why_not_heads(x: Any, *maps: Any, **options: Any) -> str | None:
    return "only some of the maps have a bias" if len({bias is None for bias in maps[1::2]}) > 1 else None


def _split(joint: Any, x: Any, weights: Any, heads: Any) -> Iterator[Any]:
    """Yield a view of the joint rows for each map, split into heads."""
    start = 0
    for weight, count in zip(weights, heads, strict=True):
        stop = start + weight.shape[1]
        yield split_heads(joint[:, start:stop], x.shape, count)
        start = stop


def _heads_forward(x: Any, *maps: Any, heads: Any, save: bool, affine: Affine) -> tuple[Any, Any]:
    """Compute one product with the concatenated matrices or, for few rows, one with each matrix."""
    rows, weights, biases = as_rows(x), maps[::2], maps[1::2]
    if len(rows) < _MIN_JOINT_ROWS or len(weights) == 1:
        outputs = [affine(rows, weight, bias) for weight, bias in zip(weights, biases, strict=True)]
        joint = weights[0] if len(weights) == 1 else None
        outputs = [split_heads(y, x.shape, count) for y, count in zip(outputs, heads, strict=True)]
        return tuple(outputs), (x, weights, joint)
    joint = np.concatenate(weights, axis=1)
    y = affine(rows, joint, None if biases[0] is None else np.concatenate(biases))
    return tuple(_split(y, x, weights, heads)), (x, weights, joint)


def _heads_vjp(g: Any, residuals: Any, needs: Any, *, heads: Any, affine: Affine) -> tuple[Any, ...]:
    x, weights, joint = residuals
    joint = np.concatenate(weights, axis=1) if joint is None else joint
    rows = as_rows(x)
    g_rows = np.empty((len(rows), joint.shape[1]), joint.dtype)
    for view, cotangent in zip(_split(g_rows, x, weights, heads), g, strict=True):
        view[...] = 0.0 if cotangent is None else cotangent
    dx = affine(g_rows, joint.T, None).reshape(x.shape) if needs[0] else None
    ends = np.cumsum([weight.shape[1] for weight in weights])[:-1]
    dweights = [affine(rows.T, columns, None) for columns in np.split(g_rows, ends, axis=1)]
    dbiases = np.split(g_rows.sum(axis=0), ends) if any(needs[2::2]) else [None] * len(weights)
    return dx, *itertools.chain(*zip(dweights, dbiases, strict=True))


def functions_with(affine: Affine) -> dict[str, tuple[Any, Any]]:
    """Return the forward and vjp of `linear` and `project_heads` that compute products with `affine`."""
    each = functools.partial
    return {
        "linear": (each(_forward, affine=affine), each(_vjp, affine=affine)),
        "project_heads": (each(_heads_forward, affine=affine), each(_heads_vjp, affine=affine)),
    }


KERNELS = [
    Kernel(
        f"numpy.{name}",
        name,
        "numpy",
        *pair,
        dtypes=FLOATS,
        why_not=_why_not_heads if name == "project_heads" else None,
    )
    for name, pair in functions_with(_affine).items()
]
