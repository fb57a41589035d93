"""Linear maps on NumPy: one product for all rows, and one for all maps of the same input."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np

from xformer.ops._numpy import FLOATS
from xformer.ops.linear.definition import as_rows, linear_functions, split_heads
from xformer.ops.operation import Kernel


def _affine(a: Any, b: Any, bias: Any) -> Any:
    y = a @ b
    if bias is not None:
        y += bias
    return y


def _parameter_cotangents(rows: Any, g_rows: Any, weight: Any, needs: Any) -> tuple[Any, Any]:
    """Return the gradient of a transposed view (the tied output layer) in the memory order of the view."""
    dweight = None
    if needs[0]:
        dweight = (g_rows.T @ rows).T if weight.flags.f_contiguous else rows.T @ g_rows
    return dweight, (g_rows.sum(axis=0) if needs[1] else None)


# Only project_heads passes an addend, and NumPy computes it differently below.
_LINEAR = linear_functions(_affine, lambda rows, weight, addend: rows @ weight.T, _parameter_cotangents)["linear"]


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


def _heads_forward(x: Any, *maps: Any, heads: Any, save: bool) -> tuple[Any, Any]:
    """Compute one product with the concatenated matrices or, for few rows, one with each matrix."""
    rows, weights, biases = as_rows(x), maps[::2], maps[1::2]
    if len(rows) < _MIN_JOINT_ROWS or len(weights) == 1:
        outputs = [_affine(rows, weight, bias) for weight, bias in zip(weights, biases, strict=True)]
        joint = weights[0] if len(weights) == 1 else None
        outputs = [split_heads(y, x.shape, count) for y, count in zip(outputs, heads, strict=True)]
        return tuple(outputs), (x, weights, joint)
    joint = np.concatenate(weights, axis=1)
    y = _affine(rows, joint, None if biases[0] is None else np.concatenate(biases))
    return tuple(_split(y, x, weights, heads)), (x, weights, joint)


def _heads_vjp(g: Any, residuals: Any, needs: Any, *, heads: Any) -> tuple[Any, ...]:
    x, weights, joint = residuals
    joint = np.concatenate(weights, axis=1) if joint is None else joint
    rows = as_rows(x)
    g_rows = np.empty((len(rows), joint.shape[1]), joint.dtype)
    for view, cotangent in zip(_split(g_rows, x, weights, heads), g, strict=True):
        view[...] = 0.0 if cotangent is None else cotangent
    dx = (g_rows @ joint.T).reshape(x.shape) if needs[0] else None
    ends = np.cumsum([weight.shape[1] for weight in weights])[:-1]
    dweights = [rows.T @ columns for columns in np.split(g_rows, ends, axis=1)]
    dbiases = np.split(g_rows.sum(axis=0), ends) if any(needs[2::2]) else [None] * len(weights)
    return dx, *itertools.chain(*zip(dweights, dbiases, strict=True))


KERNELS = [
    Kernel("numpy.linear", "linear", "numpy", *_LINEAR, dtypes=FLOATS),
    Kernel(
        "numpy.project_heads",
        "project_heads",
        "numpy",
        _heads_forward,
        _heads_vjp,
        dtypes=FLOATS,
        why_not=_why_not_heads,
    ),
]
