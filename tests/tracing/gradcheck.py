"""Check derivatives against central differences, along random directions.

One random direction sees every element of every input at once: a wrong rule passes with probability zero, at the
price of two evaluations instead of two for each element.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from xformer.backends import array_namespace
from xformer.tracing import value_and_grad

STEP = 1e-5
TOLERANCE = 1e-7  # of the derivative's size; a central difference at this step is good to some 1e-9


def directions(inputs: tuple[Any, ...], seed: int) -> tuple[Any, ...]:
    generator = np.random.default_rng(seed)
    return tuple(generator.standard_normal(x.shape) for x in inputs)


def inner(first: tuple[Any, ...], second: tuple[Any, ...]) -> Any:
    """<first, second>, over all arrays of two tuples; traced or not."""
    total: Any = np.asarray(0.0)
    for a, b in zip(first, second, strict=True):
        product = a * b
        total = total + array_namespace(product, total).sum(product)
    return total


def scalar(function: Callable[..., Any]) -> Callable[[tuple[Any, ...]], Any]:
    """Turn a function with any outputs into one with a scalar output: a random weight for every element."""

    def weighted(inputs: tuple[Any, ...]) -> Any:
        outputs = function(array_namespace(*inputs), *inputs)
        outputs = tuple(outputs) if isinstance(outputs, tuple | list) else (outputs,)
        return inner(outputs, directions(outputs, seed=1))

    return weighted


def gradient(function: Callable[[tuple[Any, ...]], Any], inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    gradients: tuple[Any, ...] = value_and_grad(function)(inputs)[1]
    for g, x in zip(gradients, inputs, strict=True):
        assert isinstance(g, np.ndarray | np.generic)
        assert g.shape == x.shape
        assert g.dtype == x.dtype
    return gradients


def difference(function: Callable[[tuple[Any, ...]], Any], inputs: tuple[Any, ...], along: tuple[Any, ...]) -> float:
    """Return the central difference of a scalar function along a direction."""
    after = function(tuple(np.asarray(x + STEP * v) for x, v in zip(inputs, along, strict=True)))
    before = function(tuple(np.asarray(x - STEP * v) for x, v in zip(inputs, along, strict=True)))
    return float(after - before) / (2.0 * STEP)


def check(function: Callable[..., Any], inputs: tuple[Any, ...], *, note: str = "") -> None:
    """Compare first and second derivatives of `function(xp, *inputs)` with differences of the order below."""
    first = scalar(function)
    along = directions(inputs, seed=2)
    expected = difference(first, inputs, along)
    actual = float(inner(gradient(first, inputs), along))
    np.testing.assert_allclose(actual, expected, rtol=TOLERANCE, atol=TOLERANCE, err_msg=note)

    def slope(inputs: tuple[Any, ...]) -> Any:
        return inner(value_and_grad(first)(inputs)[1], along)

    across = directions(inputs, seed=3)
    expected = difference(slope, inputs, across)
    actual = float(inner(gradient(slope, inputs), across))
    np.testing.assert_allclose(actual, expected, rtol=TOLERANCE, atol=TOLERANCE, err_msg=note)
