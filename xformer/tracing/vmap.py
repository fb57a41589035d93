"""`vmap`, and what is built on it: `jacobian` and `hessian`."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

from xformer.backends import device, dtype_name, is_floating
from xformer.backends.array_types import P, Positions, R
from xformer.errors import ShapeError, describe_type
from xformer.tracing.arguments import check_function
from xformer.tracing.batch import BatchTrace
from xformer.tracing.grad import as_argument, check_unwritten, replaced, selected_arguments, split_aux, vjp_in
from xformer.tracing.namespace import base_for, innermost_trace, tracing
from xformer.tracing.record import base_function
from xformer.tracing.tracer import Batch
from xformer.tree import children_of, flatten, is_array, items_of, map_arrays, map_items, rebuild_sequence


def vmap(function: Callable[P, R], in_axes: Any = 0, out_axes: Any = 0) -> Callable[P, R]:
    """Return a function that computes `function` for all elements of a batch at once.

    Functions of arrays compute all elements by one call; a few, such as `meshgrid`, by one for each. A branch on a
    value that differs between the elements raises an error. Random draws are the same for all elements, unless they
    come from `Rng.with_counter` with a counter that is mapped.

    Args:
        function: Function of Modules, arrays, and tuples, lists and dicts of them. It does not write into arguments.
        in_axes: The axis of each array along which its elements lie, or None for one that all elements share: one for
            all arguments, or a tuple with one for each, in which an item may be a tree like the argument. Arguments by
            keyword are mapped along axis 0.
        out_axes: The axis of the elements in each array of the result: one for all, or a tree like the result. None is
            for arrays that are the same for all elements.

    Returns:
        A function with the same arguments, with one more axis, and results.

    Raises:
        ShapeError: When called, if the axes do not fit the arguments or the result, or their sizes differ.
        DifferentiationError: When called, if the function reads values of a batch, or writes into its arguments.

    Examples:
        >>> import numpy as np
        >>> vmap(lambda x, y: x @ y, in_axes=(0, None))(np.eye(2), np.asarray([3.0, 4.0]))
        array([3., 4.])
    """
    check_function("vmap", function, in_axes, "in_axes")

    @functools.wraps(function)
    def mapped(*args: Any, **keywords: Any) -> Any:
        args = tuple(x if flatten(x)[0] else as_argument(x) for x in args)
        if isinstance(in_axes, tuple | list) and len(in_axes) != len(args):
            raise ShapeError(f"in_axes is {in_axes!r}; expected one item for each of {len(args)} arguments")
        axes = [*_axes_of("in_axes", args, in_axes), *[0] * len(flatten(keywords)[0])]
        leaves, rebuild = flatten((args, keywords))
        size = _size(leaves, axes)
        with tracing(base_for(leaves), lambda base: BatchTrace(base, size)) as trace:
            traced = [
                trace.wrap(x) if axis is None else trace.batched(trace.base.moveaxis(trace.unwrap(x), axis, 0))
                for x, axis in zip(leaves, axes, strict=True)
            ]
            given = [x._value for x in traced]
            args, keywords = rebuild(traced)
            result = function(*args, **keywords)
            check_unwritten(traced, given)
            return _collect(trace, result, out_axes)

    return mapped


def _is_axis(axes: Any) -> bool:
    return axes is None or type(axes) is int


def _pairs(name: str, value: Any, axes: Any) -> list[tuple[Any, Any]]:
    """Return the items of a tree, each with its axes."""
    items, given = children_of(value), children_of(axes) if isinstance(axes, tuple | list | dict) else None
    if given is None or [key for key, _ in items] != [key for key, _ in given]:
        raise ShapeError(
            f"{name} has {axes!r} for {describe_type(value)}; expected an integer, None or a tree with as many items"
        )
    return [(item, axis) for (_, item), (_, axis) in zip(items, given, strict=True)]


def _axes_of(name: str, value: Any, axes: Any) -> list[Any]:
    """Return the axis of each array of an argument, in the order of `flatten`."""
    if not _is_axis(axes):
        return [axis for pair in _pairs(name, value, axes) for axis in _axes_of(name, *pair)]
    for item in items_of(value) if axes is not None else ():
        if item is not None and not flatten(item)[0]:
            raise ShapeError(f"vmap got {describe_type(item)} to map along axis {axes}; expected arrays; see in_axes")
    return [axes] * len(flatten(value)[0])


def _size(leaves: Sequence[Any], axes: Sequence[Any]) -> int:
    """Return the number of elements of a batch."""
    sizes = set()
    for x, axis in zip(leaves, axes, strict=True):
        if axis is not None and not -x.ndim <= axis < x.ndim:
            raise ShapeError(
                f"vmap got shape {tuple(x.shape)} to map along axis {axis}, which is not there; see in_axes"
            )
        sizes |= set() if axis is None else {int(x.shape[axis])}
    if len(sizes) != 1:
        found = f"sizes {sorted(sizes)} along the mapped axes" if sizes else "no array to map"
        raise ShapeError(f"vmap got {found}; expected arrays with one size: see in_axes")
    return sizes.pop()


def _collect(trace: BatchTrace, result: Any, axes: Any) -> Any:
    """Return the results for all elements, with the batch along an axis."""
    if not _is_axis(axes):
        items = [_collect(trace, *pair) for pair in _pairs("out_axes", result, axes)]
        if isinstance(result, dict):
            return type(result)(zip((key for key, _ in children_of(result)), items, strict=True))
        return rebuild_sequence(result, items)
    if isinstance(result, tuple | list | dict):
        return map_items(lambda item: _collect(trace, item, axes), result)
    if isinstance(result, bool | int | float | complex):
        result = trace.asarray(result)
    if not is_array(result):
        return map_arrays(lambda x: _collect(trace, x, axes), result)
    value = trace.unwrap(result)
    if axes is None:
        if type(value) is Batch:
            raise ShapeError("out_axes is None for a result that differs between elements; expected an axis")
        return value
    array = value._value if type(value) is Batch else trace.base.asarray(trace.spread(value), copy=True)
    if not -array.ndim <= axes < array.ndim:
        raise ShapeError(f"out_axes has {axes} for results of shape {tuple(array.shape[1:])}; it has no such axis")
    return trace.base.moveaxis(array, 0, axes) if axes % array.ndim else array


def jacobian(function: Callable[P, Any], argnums: Positions = 0, has_aux: bool = False) -> Callable[P, Any]:
    """Return a function that computes the Jacobian of `function` in reverse mode.

    Args:
        function: Function of Modules, arrays and trees of them that returns floating arrays, or a tree of them.
        argnums: Position of the argument to differentiate, or several positions.
        has_aux: Whether `function` returns (output, auxiliary output); then the result is (Jacobian, auxiliary output).

    Returns:
        A function with the same arguments. Its result is a tree like the output, with a tree like the argument for each
        array, whose arrays have the shape of the output followed by that of the argument; None for integer arrays.

    Examples:
        >>> import numpy as np
        >>> jacobian(lambda x: x * x)(np.asarray([1.0, 2.0]))
        array([[2., 0.],
               [0., 4.]])
    """
    check_function("jacobian", function, argnums)

    @functools.wraps(function)
    def differentiated(*args: Any, **keywords: Any) -> Any:
        selected = selected_arguments(args, argnums)
        leaves, rebuild = flatten(selected)
        xp = base_for(leaves)

        def run(arrays: Any) -> Any:
            others, named = innermost_trace().constants((args, keywords))
            result = function(*replaced(others, argnums, rebuild(arrays)), **named)
            return split_aux(result) if has_aux else (result, None)

        (value, aux), pull = vjp_in(xp, run, leaves)
        outputs, rebuild_output = flatten(value)
        if not (outputs and all(is_floating(y.dtype) for y in outputs)):
            types = ", ".join(dtype_name(y.dtype) for y in outputs) or describe_type(value)
            raise ShapeError(f"the function returned {types}; jacobian expects floating arrays")
        sizes = [math.prod(y.shape) for y in outputs]
        basis = [_basis(xp, y, sum(sizes[:i]), sum(sizes)) for i, y in enumerate(outputs)]
        unused = [None] * len(flatten(aux)[0])
        rows = vmap(lambda *seeds: pull([*seeds, *unused]))(*basis)

        def block(i: int, g: Any) -> Any:
            """Return the derivatives of an output with respect to an array: some of the rows."""
            if g is None:
                return None
            part = base_function(xp, "getitem")(g, (slice(sum(sizes[:i]), sum(sizes[: i + 1])), ...))
            return xp.reshape(part, (*outputs[i].shape, *g.shape[1:]))

        result = rebuild_output([rebuild([block(i, g) for g in rows]) for i in range(len(outputs))])
        return (result, aux) if has_aux else result

    return differentiated


def _basis(xp: Any, y: Any, start: int, total: int) -> Any:
    """Return the cotangents of an output for all outputs: unit vectors for its own elements, zeros for others."""
    eye = xp.eye(total, math.prod(y.shape), k=-start, dtype=y.dtype, device=device(y))
    return xp.reshape(eye, (total, *y.shape))


def hessian(function: Callable[P, Any], argnums: Positions = 0, has_aux: bool = False) -> Callable[P, Any]:
    """Return a function that computes the Hessian of `function`, which is the Jacobian of its Jacobian.

    Args:
        function: Function that returns a floating scalar, or arrays as for `jacobian`.
        argnums: Position of the argument to differentiate, or several positions.
        has_aux: Whether `function` returns (output, auxiliary output); then the result is (Hessian, auxiliary output).

    Examples:
        >>> import numpy as np
        >>> hessian(lambda x: np.sum(x**3))(np.asarray([1.0, 2.0]))
        array([[ 6.,  0.],
               [ 0., 12.]])
    """
    check_function("hessian", function, argnums)
    return jacobian(jacobian(function, argnums, has_aux), argnums, has_aux)
