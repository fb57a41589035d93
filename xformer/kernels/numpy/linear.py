"""Linear maps on NumPy: one product for all rows, and one for all maps of the same input."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from xformer.backends.recording import empty
from xformer.kernels.numpy.arrays import supports_floats
from xformer.kernels.registry import Kernel, register
from xformer.ops.linear import as_rows
from xformer.ops.project_heads import split_heads

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


def _heads_supports(arrays: tuple[Any, ...], static: dict[str, Any]) -> str | None:
    biases = arrays[1 + len(static["heads"]) :]
    return "only some of the maps have a bias" if len({bias is None for bias in biases}) > 1 else None


def _split(joint: Any, x: Any, weights: Any, heads: Any) -> Iterator[Any]:
    """Yield a view of the joint rows for each map, split into heads."""
    start = 0
    for weight, count in zip(weights, heads, strict=True):
        stop = start + weight.shape[1]
        yield split_heads(joint[:, start:stop], x.shape, count)
        start = stop


def _heads_forward(x: Any, *maps: Any, heads: Any, save: bool, affine: Affine) -> tuple[Any, Any]:
    """Compute one product with the concatenated matrices or, for few rows, one with each matrix."""
    rows, weights, biases = as_rows(x), maps[: len(heads)], maps[len(heads) :]
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
    g_rows = empty((len(rows), joint.shape[1]), joint.dtype)
    for view, cotangent in zip(_split(g_rows, x, weights, heads), g, strict=True):
        view[...] = 0.0 if cotangent is None else cotangent
    dx = affine(g_rows, joint.T, None).reshape(x.shape) if needs[0] else None
    ends = np.cumsum([weight.shape[1] for weight in weights])[:-1]
    dweights = [affine(rows.T, columns, None) for columns in np.split(g_rows, ends, axis=1)]
    dbiases = np.split(g_rows.sum(axis=0), ends) if any(needs[-len(weights) :]) else [None] * len(weights)
    return dx, *dweights, *dbiases


def register_linear(name: str, affine: Affine, supports: Callable[..., str | None], **settings: Any) -> None:
    """Register the kernels `linear` and `project_heads` that compute products with `affine`."""

    def supports_heads(arrays: tuple[Any, ...], static: dict[str, Any]) -> str | None:
        return supports(arrays, static) or _heads_supports(arrays, static)

    for operation, operation_supports, forward, vjp in (
        ("linear", supports, _forward, _vjp),
        ("project_heads", supports_heads, _heads_forward, _heads_vjp),
    ):
        forward, vjp = (functools.partial(function, affine=affine) for function in (forward, vjp))
        register(
            Kernel(
                f"{name}.{operation}",
                operation,
                "numpy",
                operation_supports,
                forward,
                vjp,
                is_recordable=True,
                **settings,
            )
        )


register_linear("numpy", _affine, supports_floats)
