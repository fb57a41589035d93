"""`scan`: a loop whose body is a function of what it carries from step to step."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import numpy as np

from xformer.backends import array_namespace, dtype_name, is_floating
from xformer.backends.array_types import R, S, T
from xformer.errors import ShapeError, describe_type
from xformer.tracing.arguments import check_function, with_arrays
from xformer.tracing.jit import jit_repeated
from xformer.tree import flatten


def scan(
    function: Callable[[Any, S], tuple[T, R]], init: Any, xs: S | None = None, length: int | None = None,
    *, reverse: bool = False,
) -> tuple[T, R]:  # fmt: skip
    """Call `carry, y = function(carry, x)` for each element of `xs`, like `jax.lax.scan`.

    On NumPy and CuPy the steps after the first ones run as a program of `jit`, so the function must be pure; JAX
    compiles the loop. In a derivative, and in a function for jit, the steps are recorded one by one.

    Args:
        function: Function of two trees that returns two trees. The carry keeps its structure, shapes and dtypes.
        init: The first carry: Modules, arrays, numbers, and tuples, lists and dicts of them.
        xs: Arrays whose first axis is that of the steps, or a tree of them; None for a number of steps.
        length: Number of steps; default the size of that axis.
        reverse: Whether to begin with the last element.

    Returns:
        The last carry, and a tree like `y` whose arrays have one more axis, that of the steps, in the order of `xs`.

    Raises:
        ShapeError: If there is no axis of steps, sizes differ, there is no step, or the carry changes.

    Examples:
        >>> import numpy as np
        >>> scan(lambda total, x: (total + x, total), 0.0, np.asarray([1.0, 2.0, 3.0]))
        (array(6.), array([0., 1., 3.]))
    """
    check_function("scan", function)
    leaves, rebuild = flatten(xs)
    shapes = [tuple(leaf.shape) for leaf in leaves]
    sizes = {shape[0] if shape else None for shape in shapes} | ({length} - {None})
    size = next(iter(sizes), None)
    if len(sizes) != 1 or type(size) is not int or size < 1:
        raise ShapeError(
            f"scan got xs of shapes {shapes} and length={length}; expected one number of steps, at least 1"
        )
    arrays = [*leaves, *flatten(init)[0]]
    namespaces = [array_namespace(array) for array in arrays]
    if namespaces and all(xp.name == "jax" and not xp.is_trace for xp in namespaces):
        return importlib.import_module("jax").lax.scan(function, init, xs, size, reverse=reverse)
    like = next((array for array in arrays if is_floating(array.dtype)), arrays[0] if arrays else np.asarray(0.0))
    carry, rebuild_carry = flatten(with_arrays(init, like))
    expected, ys = _kinds(carry), []
    structures: list[Callable[..., Any]] = []

    def step(carry: list[Any], x: list[Any]) -> tuple[list[Any], list[Any]]:  # arrays, so that a Module is no constant
        result = function(rebuild_carry(carry), rebuild(x))
        if not isinstance(result, tuple | list) or len(result) != 2:
            raise ShapeError(f"the function of scan returned {describe_type(result)}; expected a pair, (carry, y)")
        (arrays, structure), (y, rebuild_y) = map(flatten, with_arrays(tuple(result), like))
        if _kinds(arrays) != expected:
            raise ShapeError(f"the function of scan returned a carry of {_kinds(arrays)}; expected {expected}")
        structures[:] = structure, rebuild_y
        return arrays, y

    compiled = jit_repeated(step)
    for index in range(size)[:: -1 if reverse else 1]:
        carry, y = compiled(carry, [leaf[index, ...] for leaf in leaves])
        ys.append(y)
    columns = zip(*ys[:: -1 if reverse else 1], strict=True)
    stacked = [array_namespace(*column).stack(list(column)) for column in columns]
    return structures[0](carry), structures[1](stacked)


def _kinds(arrays: list[Any]) -> list[tuple[tuple[int, ...], str]]:
    return [(tuple(array.shape), dtype_name(array.dtype)) for array in arrays]
