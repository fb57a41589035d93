"""`vmap`, and what is built on it, `jacobian` and `hessian`; and `scan`."""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from xformer.backends import array_namespace, device, dtype_name, is_floating
from xformer.backends.array_types import P, Positions, R, S, T
from xformer.errors import DifferentiationError, ShapeError, describe_type
from xformer.tracing.arguments import check_function, with_arrays
from xformer.tracing.grad import as_argument, check_unwritten, replaced, selected_arguments, split_aux, vjp_in
from xformer.tracing.jit import jit_repeated
from xformer.tracing.namespace import GradTrace, base_for, innermost_trace, tracing
from xformer.tracing.record import VIEWS, Function, as_view, base_function, innermost
from xformer.tracing.rule import DECOMPOSITIONS
from xformer.tracing.rules.elementwise import ELEMENTWISE, ELEMENTWISE_CONSTANTS
from xformer.tracing.tracer import BINARY_OPERATORS, UNARY_OPERATORS, Batch, Tracer
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
        received = f"{name} has {axes!r} for {describe_type(value)}"
        raise ShapeError(f"{received}; expected an integer, None or a tree with as many items")
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
            problem = f"vmap got shape {tuple(x.shape)} to map along axis {axis}, which is not there"
            raise ShapeError(f"{problem}; see in_axes")
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


# --- The namespace, whose functions compute all elements of a batch ---------------------------------------------------
#
# Elements are along the first axis of its arrays. A function has a rule that shifts its axes, or is called for each
# element in turn and the results are stacked: so every function of the standard works. A rule may fail, or raise
# `NoRule`; the loop then decides, whose errors are those of the function of one element.

_SEQUENCES = "concat", "stack"
_INDEXED = "getitem", "setitem"  # by tuples that may have batches


class NoRule(ValueError):
    """A call has no rule."""


class BatchTrace(GradTrace):
    """The trace of one `vmap`.

    The value of a tracer is a `Batch`, or an array of the base namespace that is the same for all elements; its index
    is 0 or -1.

    Attributes:
        size: The number of elements.
    """

    apply = GradTrace.apply_definition

    def __init__(self, base: Any, size: int) -> None:
        super().__init__(base)
        self.size = size
        self.__name__ = f"{base.__name__}.vmap{self.trace_level}"

    def bind(self, name: str, function: Function) -> Function:
        """Return the function for all elements."""
        if name == "unstack":
            return innermost(self, name, self._unstack)

        def call(*args: Any, **keywords: Any) -> Any:
            if name in _SEQUENCES:
                args = ([x if is_array(x) else self.asarray(self.stacked(x)) for x in args[0]], *args[1:])
            elif name not in _INDEXED:
                args = tuple(map(self.stacked, args))
            given, options = self.unwrap(args), {key: self.unwrap(value) for key, value in keywords.items()}
            if not any(type(x) is Batch for x in items_of((given, options))):
                result = self.wrap(function(*given, **options))
            else:
                result = self._compute(name, function, given, options)
            is_view = name in VIEWS and not keywords.get("copy") and type(args[0]) is Tracer
            if is_view and type(result) is Tracer and type(args[0]._value) is type(result._value):
                return as_view(args[0], result, name, args[1:], keywords)
            return result

        return innermost(self, name, call, has_list=True)

    def _compute(self, name: str, function: Function, args: Any, keywords: Any) -> Any:
        if name in DECOMPOSED:
            return DECOMPOSITIONS[name](self, *map(self.wrap, args), **keywords)
        try:
            if name in RULES:
                return self.batched(RULES[name](self, function, *args, **keywords))
            rest = items_of((args[1:], keywords))
            if name in FIRST_RULES and type(args[0]) is Batch and not any(type(x) is Batch for x in rest):
                return self.batched(FIRST_RULES[name](self, function, *args, **keywords))
        except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):
            pass  # of the libraries, for axes or shapes
        return self.loop(function, *args, name=name, **keywords)

    def loop(self, function: Function, *args: Any, name: str = "a function", **keywords: Any) -> Any:
        """Call a function for each element, and stack the results."""
        results = []
        for i in range(max(self.size, 1)):  # of no elements, one shows the shapes
            values, options = self._element(i, (args, keywords))
            results.append(function(*values, **options))
        return self._stacked(name, results)

    def _element(self, index: int, value: Any) -> Any:
        if type(value) is Batch:
            x = value._value
            x = x if self.size else self.base.zeros((1, *x.shape[1:]), dtype=x.dtype, device=device(x))
            return base_function(self.base, "getitem")(x, (index, ...))
        return map_items(functools.partial(self._element, index), value)

    def _stacked(self, name: str, results: list[Any]) -> Any:
        first = results[0]
        if isinstance(first, tuple | list):
            return rebuild_sequence(first, [self._stacked(name, list(items)) for items in zip(*results, strict=True)])
        if not is_array(first):
            return first
        if len({tuple(x.shape) for x in results}) > 1:
            hint = "use functions whose shapes do not depend on values, such as xp.where(mask, x, 0)"
            raise ShapeError(f"{name} has results of different shapes for the elements of vmap; {hint}")
        stacked = self.base.stack([self.base.asarray(x) for x in results])
        return self.batched(stacked if self.size else stacked[:0, ...])

    # --- values -------------------------------------------------------------------------------------------------------

    def wrap(self, value: Any) -> Any:
        """Wrap batches and arrays of the base namespace, also in tuples and lists."""
        return Tracer(value, self, 0) if type(value) is Batch else super().wrap(value)

    def batched(self, value: Any) -> Any:
        """Wrap arrays of the base namespace that have the values of all elements, also in tuples and lists."""
        if type(value) is Tracer and value._namespace is self:
            return value
        if isinstance(value, tuple | list):
            return rebuild_sequence(value, map(self.batched, value))
        return Tracer(Batch(value), self, 0) if is_array(value) else value

    def fit(self, x: Any, rank: int) -> Any:
        """Return the array of a batch, with axes of length one that give its elements a rank; others as they are."""
        if type(x) is not Batch or x.ndim == rank:
            return x._value if type(x) is Batch else x
        if x.ndim > rank:
            raise NoRule
        return self.base.reshape(x._value, (self.size, *[1] * (rank - x.ndim), *x.shape))

    def spread(self, x: Any) -> Any:
        """Return an array with the values of all elements, also for one that is the same for all."""
        return x._value if type(x) is Batch else self.base.broadcast_to(x, (self.size, *x.shape))

    def read(self, x: Tracer, use: str) -> Any:
        """Return the value of an array that is the same for all elements."""
        if type(x._value) is not Batch:
            return super().read(x, use)
        hint = "use xp.where instead of a branch" if use == "bool" else "use functions of array_namespace(x)"
        raise DifferentiationError(f"{use} reads an array in vmap that has a value for each element; {hint}")

    def check_range(self, x: Any, size: int, check: Callable[[Any], None]) -> None:
        """Check the values of all elements."""
        x = self.unwrap(x)
        self.base.check_range(x._value if type(x) is Batch else x, size, check)

    def call_on_host(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function that reads arrays, for each element if they differ."""
        values = self.unwrap(args)
        if not any(type(x) is Batch for x in values):
            return self.wrap(self.base.call_on_host(function, *values))
        return self.loop(functools.partial(self.base.call_on_host, function), *values)

    def _unstack(self, x: Any, /, *, axis: int = 0) -> tuple[Any, ...]:
        before = (slice(None),) * (axis % x.ndim)
        return tuple(self.getitem(x, (*before, i, ...)) for i in range(x.shape[axis]))


# --- rules ------------------------------------------------------------------------------------------------------------
#
# A rule is f(trace, function of the base namespace, *arguments), in which a Batch stands for an array of the trace. It
# returns what the function does, for all elements along the first axis.

RULES: dict[str, Function] = {}  # each array may be a Batch
FIRST_RULES: dict[str, Function] = {}  # the first array is a Batch, and no other one
DECOMPOSED = {"tensordot", "linalg.outer", *(f"fft.{name}" for name in ("fftn", "ifftn", "rfftn", "irfftn"))}
DECOMPOSED |= {"fft.fftshift", "fft.ifftshift"}


def _rank(x: Any) -> int:
    return x.ndim if is_array(x) or type(x) is Batch else 0


def _shifted(axis: Any, rank: int) -> Any:
    """Return the axis, or axes, in arrays with the batch in front."""
    if isinstance(axis, tuple | list):
        return tuple(_shifted(each, rank) for each in axis)
    if not -rank <= axis < rank:
        raise NoRule
    return axis % rank + 1


def _elementwise(trace: BatchTrace, function: Function, *args: Any, **keywords: Any) -> Any:
    rank = max(map(_rank, (*args, *keywords.values())))
    return function(*[trace.fit(x, rank) for x in args], **{key: trace.fit(x, rank) for key, x in keywords.items()})


def _natural(rank: int) -> Function:
    """Return the rule of a function that takes leading axes; its elements need a rank."""

    def rule(trace: BatchTrace, function: Function, x: Batch, *args: Any, **keywords: Any) -> Any:
        if x.ndim < rank:
            raise NoRule
        return function(x._value, *args, **keywords)

    return rule


def _along(default: Any) -> Function:
    """Return the rule of a function along an axis: the default, "all" axes, the "only" one, or of the "flat" array."""

    def rule(trace: BatchTrace, function: Function, x: Any, *args: Any, axis: Any = None, **keywords: Any) -> Any:
        if {"prepend", "append"} & {*keywords} or (axis is None and default == "all" and x.ndim == 0):
            raise NoRule
        if axis is None and default == "flat" and not keywords:
            x = Batch(trace.base.reshape(x._value, (trace.size, x.size)))
        if axis is None and default in ("only", "flat") and x.ndim != 1:
            raise NoRule
        if axis is None:
            axis = tuple(range(x.ndim)) if default == "all" else -1
        return function(x._value, *args, axis=_shifted(axis, x.ndim), **keywords)

    return rule


def _reshape(trace: BatchTrace, function: Function, x: Batch, shape: Any, **keywords: Any) -> Any:
    known = math.prod(size for size in shape if size != -1)
    shape = [x.size // (known or 1) if size == -1 else size for size in shape]
    return function(x._value, (trace.size, *shape), **keywords)


def _expand_dims(trace: BatchTrace, function: Function, x: Batch, axis: Any = 0) -> Any:
    return function(x._value, axis=_shifted(axis, x.ndim + (1 if isinstance(axis, int) else len(axis))))


def _inplace(trace: BatchTrace, function: Function, x: Any, other: Any) -> Any:
    if _rank(other) > x.ndim:
        raise NoRule
    return function(trace.spread(x), trace.fit(other, x.ndim))


def _tile(trace: BatchTrace, function: Function, x: Batch, repetitions: Any) -> Any:
    rank = max(x.ndim, len(repetitions))
    return function(trace.fit(x, rank), (*[1] * (rank + 1 - len(repetitions)), *repetitions))


def _concat(trace: BatchTrace, function: Function, arrays: Any, *, axis: int | None = 0) -> Any:
    values = list(map(trace.spread, arrays))
    if axis is None:
        return function([trace.base.reshape(x, (trace.size, math.prod(x.shape[1:]))) for x in values], axis=1)
    return function(values, axis=_shifted(axis, arrays[0].ndim))


FACTORIZATIONS = (
    *("cholesky", "det", "diagonal", "eigh", "eigvalsh", "inv", "matrix_norm", "matrix_power", "matrix_rank", "pinv"),
    *("qr", "slogdet", "svd", "svdvals", "trace"),
)
_OF_ONE: tuple[tuple[Any, ...], ...] = (
    (_natural(0), "asarray", "astype", "empty_like", "from_dlpack", "full_like", "isin", "ones_like", "zeros_like"),
    (_natural(0), "to_device"),
    (_natural(1), "top_k"),
    (_natural(2), "matrix_transpose", "tril", "triu", *(f"linalg.{name}" for name in FACTORIZATIONS)),
    (_along("all"), "sum", "prod", "mean", "max", "min", "var", "std", "all", "any", "count_nonzero", "flip"),
    (_along("all"), "linalg.vector_norm"),
    (_along("only"), "cumulative_sum", "cumulative_prod", "roll"),
    (_along("flat"), "argmax", "argmin", "repeat"),
    (_along(-1), "argsort", "diff", "sort", *(f"fft.{name}" for name in ("fft", "ifft", "rfft", "irfft"))),
    (_along(-1), "fft.hfft", "fft.ihfft"),
    (_reshape, "reshape"),
    (_tile, "tile"),
    (lambda trace, function, x, shape: function(trace.fit(x, len(shape)), (trace.size, *shape)), "broadcast_to"),
    (lambda trace, function, x, axes: function(x._value, (0, *_shifted(axes, x.ndim))), "permute_dims"),
    (lambda trace, function, x, *axes: function(x._value, *(_shifted(each, x.ndim) for each in axes)), "moveaxis"),
    (lambda trace, function, x, axis: function(x._value, axis=_shifted(axis, x.ndim)), "squeeze"),
    (_expand_dims, "expand_dims"),
)
FIRST_RULES.update((name, rule) for rule, *names in _OF_ONE for name in names)


def _matmul(trace: BatchTrace, function: Function, a: Any, b: Any) -> Any:
    x, y = trace.wrap(a), trace.wrap(b)
    if a.ndim == 1:
        product = trace.matmul(x[None, :], y)
        return product[..., 0] if b.ndim == 1 else product[..., 0, :]
    return trace.matmul(x, y[:, None])[..., 0] if b.ndim == 1 else _aligned(trace, function, a, b, rank=2)


def _solve(trace: BatchTrace, function: Function, a: Any, b: Any) -> Any:
    if b.ndim == 1:
        return trace.linalg.solve(trace.wrap(a), trace.wrap(b)[:, None])[..., 0]
    return _aligned(trace, function, a, b, rank=2)


def _aligned(trace: BatchTrace, function: Function, a: Any, b: Any, *, rank: float, **keywords: Any) -> Any:
    """Align the leading axes of two arrays, whose last ones the function takes."""
    if min(a.ndim, b.ndim) < rank:
        raise NoRule
    return function(*(trace.fit(x, max(a.ndim, b.ndim)) for x in (a, b)), **keywords)


def _last_axis(trace: BatchTrace, function: Function, a: Any, b: Any, *, axis: int = -1) -> Any:
    return _aligned(trace, function, a, b, rank=-axis if axis < 0 else math.inf, axis=axis)


# --- positions --------------------------------------------------------------------------------------------------------


def _is_key(item: Any) -> bool:
    return is_array(item) or type(item) is Batch


def _key(trace: BatchTrace, key: Any, *, has_batch: bool) -> Any:
    """Return an index of arrays with the batch in front for one of elements."""
    keys = key if isinstance(key, tuple) else (key,)
    if any(isinstance(item, list | bool) or (_is_key(item) and "int" not in str(item.dtype)) for item in keys):
        raise NoRule
    if not any(_is_key(item) and (type(item) is Batch or item.ndim) for item in keys):
        return (slice(None), *keys) if any(item is ... for item in keys) else (slice(None), *keys, ...)
    if not all(isinstance(item, int) or _is_key(item) for item in keys):
        raise NoRule
    rank = max(map(_rank, keys))
    keys = tuple(trace.fit(item, rank) for item in keys)
    if not has_batch:
        return keys
    numbers = trace.base.arange(trace.size, device=next(device(item) for item in keys if is_array(item)))
    return (trace.base.reshape(numbers, (trace.size, *[1] * rank)), *keys)


def _getitem(trace: BatchTrace, function: Function, x: Any, key: Any) -> Any:
    has_batch = type(x) is Batch
    return function(x._value if has_batch else x, _key(trace, key, has_batch=has_batch))


def _setitem(trace: BatchTrace, function: Function, x: Any, value: Any, key: Any) -> Any:
    target, key = trace.spread(x), _key(trace, key, has_batch=True)
    rank = base_function(trace.base, "getitem")(target, key).ndim - 1
    if _rank(value) > rank:
        raise NoRule
    return function(target, trace.fit(value, rank), key)


def _take(trace: BatchTrace, function: Function, x: Any, indices: Any, *, axis: int | None = None) -> Any:
    if (axis is None and x.ndim != 1) or indices.ndim != 1:
        raise NoRule
    if type(indices) is not Batch:
        return function(x._value, indices, axis=_shifted(axis or 0, x.ndim))
    x, indices = map(trace.wrap, (x, indices))
    return trace.moveaxis(trace.moveaxis(x, axis or 0, 0)[indices, ...], 0, axis or 0)


def _scatter_add(trace: BatchTrace, function: Function, target: Any, indices: Any, updates: Any) -> Any:
    """Add to the rows of all elements as to those of one array."""
    rows, xp = target.shape[0], trace.base
    target, indices, updates = map(trace.spread, (target, indices, updates))
    starts = rows * xp.arange(trace.size, dtype=indices.dtype, device=device(indices))
    indices = xp.reshape(indices + xp.expand_dims(starts, axis=1), (-1,))
    flat = [xp.reshape(x, (x.shape[0] * x.shape[1], *x.shape[2:])) for x in (target, updates)]
    return xp.reshape(function(flat[0], indices, flat[1]), target.shape)


OPERATORS = {f"operator_{name}" for name in (*BINARY_OPERATORS, *UNARY_OPERATORS) if name != "matmul"}
_OF_ALL: tuple[tuple[Any, ...], ...] = (
    (_elementwise, *ELEMENTWISE, *ELEMENTWISE_CONSTANTS, *OPERATORS, "broadcast_arrays"),
    (_inplace, *(f"inplace_{name}" for name in BINARY_OPERATORS if name != "matmul")),
    (
        lambda trace, function, *args: function(*[x._value if type(x) is Batch else x for x in args]),
        *("can_cast", "finfo", "iinfo", "isdtype", "result_type"),
    ),
    (_concat, "concat"),
    (lambda trace, function, x, axis=0: function([*map(trace.spread, x)], axis=_shifted(axis, x[0].ndim + 1)), "stack"),
    (_matmul, "matmul", "operator_matmul"),
    (_solve, "linalg.solve"),
    (_last_axis, "vecdot", "linalg.cross"),
    (_getitem, "getitem"),
    (_setitem, "setitem"),
    (_take, "take"),
    (
        lambda trace, function, x, indices, *, axis=-1: function(
            trace.spread(x), trace.spread(indices), axis=_shifted(axis, x.ndim)
        ),
        "take_along_axis",
    ),
    (_scatter_add, "scatter_add"),
)
RULES.update((name, rule) for rule, *names in _OF_ALL for name in names)


# --- scan -------------------------------------------------------------------------------------------------------------


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
        received = f"scan got xs of shapes {shapes} and length={length}"
        raise ShapeError(f"{received}; expected one number of steps, at least 1")
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
