"""Functions of the Array API standard as operations of the native library.

`LOWERINGS["add"](out, args, keywords)` computes what `np.add(*args, **keywords)` returned into the array `out`, and
returns True; or it calls nothing and returns False, if the library has no operation for these dtypes or options. All
effects are made by `native.call`, so that the calls can be recorded. Names are those of the namespace of a trace:
functions of the standard, `operator_add` and others for operators of Python, and `getitem`, `setitem`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from xformer import native

Lowering = Callable[[Any, tuple[Any, ...], dict[str, Any]], bool]

LOWERINGS: dict[str, Lowering] = {}

_MAX_DIMS = 6
_BOOL, _INT32, _INT64 = np.dtype(np.bool_), np.dtype(np.int32), np.dtype(np.int64)
_FLOAT32, _FLOAT64 = np.dtype(np.float32), np.dtype(np.float64)
_FLOATS, _INTEGERS = (_FLOAT32, _FLOAT64), (_INT64,)  # what they compute; any is copied and taken
_NUMBERS = (*_FLOATS, *_INTEGERS)


# --- registration -------------------------------------------------------------------------------------------------


def _lowering(*names: str) -> Callable[[Callable[..., bool]], Callable[..., bool]]:
    """Register a function of the output and the arguments; arguments that it does not declare are not supported."""

    def register(function: Callable[..., bool]) -> Callable[..., bool]:
        signature = inspect.signature(function)

        def lower(out: Any, args: tuple[Any, ...], keywords: dict[str, Any]) -> bool:
            if not isinstance(out, np.ndarray) or not out.flags.writeable:
                return False
            if not all(native.can_copy(array, array.dtype) for array in _arrays((out, args, keywords))):
                return False
            try:
                bound = signature.bind(out, *args, **keywords)
            except TypeError:
                return False
            return function(*bound.args, **bound.kwargs)

        LOWERINGS.update(dict.fromkeys(names, lower))
        return function

    return register


def _arrays(value: Any) -> Iterator[Any]:
    """Yield the arrays in nested tuples, lists and dicts."""
    if isinstance(value, dict):
        value = tuple(value.values())
    if isinstance(value, (tuple, list)):
        for item in value:
            yield from _arrays(item)
    elif isinstance(value, np.ndarray):
        yield value


# --- operands -----------------------------------------------------------------------------------------------------


def _is_operand(x: Any) -> bool:
    return isinstance(x, (np.ndarray, bool, int, float, np.bool_, np.integer, np.floating))


def _operand(x: Any, dtype: Any) -> Any:
    """Return an array or a number as an array of a dtype: itself, a constant, or a temporary."""
    if not isinstance(x, np.ndarray):
        return np.asarray(x, dtype)
    return x if x.dtype == dtype else _copied(x, np.empty(x.shape, dtype))


def _copied(x: Any, out: Any) -> Any:
    native.call("copy", (x, out))
    return out


def _copy_unless_same(x: Any, out: Any) -> bool:
    """Copy an array, unless the output is the same memory."""
    if _layout(x) != _layout(out):
        native.call("copy", (x, out))
    return True


def _layout(x: Any) -> tuple[Any, ...]:
    return x.__array_interface__["data"][0], x.dtype, x.shape, x.strides


def _fill(out: Any, value: Any) -> bool:
    value = out.dtype.type(value)
    native.call("fill", (out,), **({"n0": float(value)} if out.dtype in _FLOATS else {"i0": int(value)}))
    return True


# --- elementwise functions ----------------------------------------------------------------------------------------


def _elementwise(operation: str, dtypes: tuple[Any, ...], *names: str, is_predicate: bool = False) -> None:
    """Register a function whose operands are cast to the dtype of the result, or to a common one for a predicate."""

    @_lowering(operation, *names)
    def lower(out: Any, /, *operands: Any) -> bool:
        if not all(map(_is_operand, operands)):
            return False
        dtype = np.result_type(*operands) if is_predicate else out.dtype
        for x in operands if is_predicate else ():  # NumPy compares integers of Python with any dtype
            if type(x) is int and dtype in _INTEGERS and not np.iinfo(dtype).min <= x <= np.iinfo(dtype).max:
                return False
        if dtype in dtypes:
            native.call(operation, (*[_operand(x, dtype) for x in operands], out))
        return dtype in dtypes


_elementwise("add", _NUMBERS, "operator_add")
_elementwise("subtract", _NUMBERS, "operator_sub")
_elementwise("multiply", _NUMBERS, "operator_mul")
_elementwise("divide", _FLOATS, "operator_truediv")
_elementwise("floor_divide", _INTEGERS, "operator_floordiv")
_elementwise("remainder", _INTEGERS, "operator_mod")
for _name in ("maximum", "minimum"):  # of floats, NumPy decides by the processor which of two zeros is larger
    _elementwise(_name, _INTEGERS)
for _names in (("equal", "eq"), ("not_equal", "ne"), ("less", "lt"), ("less_equal", "le"), ("greater", "gt")):
    _elementwise(_names[0], (*_NUMBERS, _BOOL), f"operator_{_names[1]}", is_predicate=True)
_elementwise("greater_equal", (*_NUMBERS, _BOOL), "operator_ge", is_predicate=True)
for _name in ("and", "or", "xor"):
    _elementwise(f"logical_{_name}", (_BOOL,), f"bitwise_{_name}", f"operator_{_name}")
_elementwise("negative", _NUMBERS, "operator_neg")
_elementwise("abs", _NUMBERS, "operator_abs")
for _name in ("square", "sign"):
    _elementwise(_name, _NUMBERS)
for _name in ("sqrt", "reciprocal"):
    _elementwise(_name, _FLOATS)
_elementwise("logical_not", (_BOOL,), "bitwise_invert", "operator_invert")
for _name in ("isfinite", "isinf", "isnan"):
    _elementwise(_name, _FLOATS, is_predicate=True)


@_lowering("where")
def _where(out: Any, condition: Any, a: Any, b: Any, /) -> bool:
    is_known = isinstance(condition, np.ndarray) and condition.dtype == _BOOL and _is_operand(a) and _is_operand(b)
    if is_known:
        native.call("where", (condition, _operand(a, out.dtype), _operand(b, out.dtype), out))
    return is_known


@_lowering("clip")
def _clip(out: Any, x: Any, /, min: Any = None, max: Any = None) -> bool:
    bounds = [(name, bound) for name, bound in (("maximum", min), ("minimum", max)) if bound is not None]
    if out.dtype not in _INTEGERS or x.dtype != out.dtype or not all(_is_operand(bound) for _, bound in bounds):
        return False
    if any(np.result_type(bound, x) != x.dtype for _, bound in bounds):
        return False
    for operation, bound in bounds:
        native.call(operation, (x, _operand(bound, out.dtype), out))
        x = out
    return bool(bounds) or _copy_unless_same(x, out)


# --- creation and copies ------------------------------------------------------------------------------------------


for _number, _name in enumerate(("zeros", "ones")):
    _lowering(_name, f"{_name}_like")(
        lambda out, like, /, *, dtype=None, device=None, number=_number: _fill(out, number)
    )
_lowering("empty", "empty_like")(lambda out, like, /, *, dtype=None, device=None: True)


@_lowering("full", "full_like")
def _full(out: Any, like: Any, fill_value: Any, /, *, dtype: Any = None, device: Any = None) -> bool:
    if isinstance(fill_value, np.ndarray):
        return _copy_unless_same(fill_value, out)
    return _is_operand(fill_value) and _fill(out, fill_value)


@_lowering("astype", "asarray", "positive", "operator_pos")
def _copy(out: Any, x: Any, dtype: Any = None, /, **options: Any) -> bool:
    return isinstance(x, np.ndarray) and _copy_unless_same(x, out)


@_lowering("reshape")
def _reshape(out: Any, x: Any, /, shape: Any = None, *, copy: Any = None) -> bool:
    return out.flags.c_contiguous and _copy_unless_same(x, out.reshape(x.shape))


# --- reductions ---------------------------------------------------------------------------------------------------


def _mask_of(axis: Any, ndim: int) -> int:
    """Return the bit mask of axes; NumPy also takes the axes 0 and -1 of an array without axes."""
    axes = range(ndim) if axis is None or ndim == 0 else axis if isinstance(axis, tuple) else (axis,)
    return sum(1 << (a % ndim) for a in axes)


def _reduction(operation: str, inputs: dict[Any, tuple[Any, ...]]) -> None:
    """Register a reduction; `inputs` are the dtypes that it takes for each dtype of the result, the first by casts."""

    @_lowering(operation)
    def lower(out: Any, x: Any, /, axis: Any = None, *, dtype: Any = None, keepdims: bool = False) -> bool:
        dtypes = inputs.get(out.dtype)
        if dtypes is None:
            return False
        x = x if x.dtype in dtypes else _operand(x, dtypes[0])
        native.call(operation, (x, out), _mask_of(axis, x.ndim))
        return True


# NumPy rounds sums of floats in another order.
_reduction("sum", {_INT64: (_INT64, _BOOL)})
_reduction("any", {_BOOL: (_BOOL, *_NUMBERS)})
_reduction("all", {_BOOL: (_BOOL, *_NUMBERS)})


@_lowering("cumulative_sum")
def _cumulative_sum(out: Any, x: Any, /, *, axis: Any = None, dtype: Any = None, include_initial: bool = False) -> bool:
    if out.dtype != _INT64 or x.dtype not in (_INT64, _BOOL) or x.ndim == 0:
        return False
    axis = 0 if axis is None else axis % x.ndim
    if include_initial:
        before = (slice(None),) * axis
        _fill(out[(*before, slice(1))], 0)
        out = out[(*before, slice(1, None))]
    native.call("cumulative_sum", (x, out), axis)
    return True


# --- indexing -----------------------------------------------------------------------------------------------------


def _is_index(x: Any) -> bool:
    return isinstance(x, np.ndarray) and x.dtype in (_INT32, _INT64)


@_lowering("take")
def _take(out: Any, x: Any, indices: Any, /, axis: Any = None) -> bool:
    if not _is_index(indices) or out.ndim >= _MAX_DIMS or x.ndim == 0 or (axis is None and x.ndim > 1):
        return False
    native.call("take", (x, indices, out), 0 if axis is None else axis % x.ndim)
    return True


def _indexed_axis(x: Any, key: Any) -> int | None:
    """Return the axis that a key of one array of integers and else whole axes indexes; None for another key."""
    keys = list(key) if isinstance(key, tuple) else [key]
    if any(k is Ellipsis for k in keys):
        at = next(i for i, k in enumerate(keys) if k is Ellipsis)
        keys[at : at + 1] = [slice(None)] * (x.ndim - len(keys) + 1)
    axes = [axis for axis, k in enumerate(keys) if not (isinstance(k, slice) and k == slice(None))]
    return axes[0] if len(axes) == 1 and _is_index(keys[axes[0]]) else None


def _is_basic(key: Any) -> bool:
    """Return whether a key makes a view."""
    keys = key if isinstance(key, tuple) else (key,)
    return all(
        k is None or k is Ellipsis or (isinstance(k, (slice, int, np.integer)) and not isinstance(k, bool))
        for k in keys
    )


def _view_at(x: Any, key: Any) -> Any:
    """Return `x[key]` for a basic key; never a number."""
    keys = key if isinstance(key, tuple) else (key,)
    return x[keys if any(k is Ellipsis for k in keys) else (*keys, ...)]


@_lowering("getitem")
def _get_item(out: Any, x: Any, key: Any, /) -> bool:
    if _is_basic(key):
        return _copy_unless_same(_view_at(x, key), out)
    axis = _indexed_axis(x, key)
    return axis is not None and _take(out, x, next(_arrays(key)), axis)


@_lowering("setitem")
def _set_item(out: Any, x: Any, value: Any, key: Any, /) -> bool:
    target = _view_at(out, key) if _is_basic(key) else None
    axis = _indexed_axis(x, key) if target is None else None
    if not _is_operand(value) or (axis is None and target is None):
        return False
    indices: Any = None if axis is None else next(_arrays(key))
    if (x.ndim + indices.ndim > _MAX_DIMS) if target is None else (target.ndim > _MAX_DIMS):
        return False
    value = _operand(value, out.dtype)
    if np.may_share_memory(value, out):
        value = _copied(value, np.empty(value.shape, value.dtype))
    _copy_unless_same(x, out)
    if target is not None:
        native.call("copy", (_without_leading_ones(value, target.ndim), target))
    else:
        native.call("put", (_without_leading_ones(value, x.ndim - 1 + indices.ndim), indices, out), axis or 0)
    return True


def _without_leading_ones(x: Any, ndim: int) -> Any:
    """Drop axes of one element that an assigned array has beyond those of its target."""
    return x.reshape(x.shape[x.ndim - ndim :]) if x.ndim > ndim else x


# --- products of matrices -----------------------------------------------------------------------------------------


@_lowering("matmul", "operator_matmul")
def _matmul(out: Any, a: Any, b: Any, /) -> bool:
    is_native = native.is_reproducible() and all(x.dtype == _FLOAT32 and x.ndim > 1 for x in (out, a, b))
    if is_native:
        native.call("matmul", (a, b, out))
    return is_native
