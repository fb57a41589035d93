"""Linear maps on NumPy: matrix products kept whole, those of several maps of one input made as one."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from xformer.kernels.numpy.support import floats
from xformer.kernels.registry import Kernel, register
from xformer.ops.linear import as_rows

# The product of matrices (rows, k) and (k, columns), each perhaps a transposed view, plus a bias (columns,) or None.
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
        # A weight given transposed (the tied output) gets its gradient in its own memory order.
        transposed = weight.flags.f_contiguous
        dweight = affine(g_rows.T, as_rows(x), None).T if transposed else affine(as_rows(x).T, g_rows, None)
    return dx, dweight, (g_rows.sum(axis=0) if needs[2] else None)


# --- project_heads ---------------------------------------------------------------------------------------------------

_FEW_ROWS = 96  # fewer, as in decoding, cost less than bringing the matrices together


def _heads_supports(arrays: tuple[Any, ...], static: dict[str, Any]) -> str | None:
    biases = arrays[1 + len(static["heads"]) :]
    return "some of the maps have a bias" if len({bias is None for bias in biases}) > 1 else None


def _in_heads(rows: Any, x: Any, heads: int) -> Any:
    return rows.reshape(*x.shape[:2], heads, rows.shape[1] // heads).transpose(0, 2, 1, 3)


def _cut(joint: Any, x: Any, weights: Any, heads: Any) -> Iterator[Any]:
    """Each map's part of the joint rows, in heads: a view."""
    first = 0
    for weight, count in zip(weights, heads, strict=True):
        yield _in_heads(joint[:, first : first + weight.shape[1]], x, count)
        first += weight.shape[1]


def _heads_forward(x: Any, *maps: Any, heads: Any, save: bool, affine: Affine) -> tuple[Any, Any]:
    """One product with all matrices side by side, or, for few rows, one with each where it is."""
    rows, weights, biases = as_rows(x), maps[: len(heads)], maps[len(heads) :]
    if len(rows) < _FEW_ROWS or len(weights) == 1:
        outputs = [affine(rows, weight, bias) for weight, bias in zip(weights, biases, strict=True)]
        joint = weights[0] if len(weights) == 1 else None
        return tuple(_in_heads(y, x, count) for y, count in zip(outputs, heads, strict=True)), (x, weights, joint)
    joint = np.concatenate(weights, axis=1)
    y = affine(rows, joint, None if biases[0] is None else np.concatenate(biases))
    return tuple(_cut(y, x, weights, heads)), (x, weights, joint)


def _heads_vjp(g: Any, residuals: Any, needs: Any, *, heads: Any, affine: Affine) -> tuple[Any, ...]:
    x, weights, joint = residuals
    joint = np.concatenate(weights, axis=1) if joint is None else joint
    rows = as_rows(x)
    g_rows = np.empty((len(rows), joint.shape[1]), joint.dtype)
    for part, given in zip(_cut(g_rows, x, weights, heads), g, strict=True):
        part[...] = 0.0 if given is None else given
    dx = affine(g_rows, joint.T, None).reshape(x.shape) if needs[0] else None
    ends = np.cumsum([weight.shape[1] for weight in weights])[:-1]
    dweights = [affine(rows.T, part, None) for part in np.split(g_rows, ends, axis=1)]
    dbiases = np.split(g_rows.sum(axis=0), ends) if any(needs[-len(weights) :]) else [None] * len(weights)
    return dx, *dweights, *dbiases


def register_maps(name: str, affine: Affine, supports: Callable[..., str | None], **settings: Any) -> None:
    """Register kernels for linear maps, made of an affine one."""

    def both(arrays: tuple[Any, ...], static: dict[str, Any]) -> str | None:
        return supports(arrays, static) or _heads_supports(arrays, static)

    for operation, check, forward, vjp in (
        ("linear", supports, _forward, _vjp),
        ("project_heads", both, _heads_forward, _heads_vjp),
    ):
        forward, vjp = (functools.partial(function, affine=affine) for function in (forward, vjp))
        register(Kernel(f"{name}.{operation}", operation, "numpy", check, forward, vjp, **settings))


register_maps("numpy", _affine, floats)
