"""Recording of NumPy calls: every elementary call of a function is appended to a tape and can be repeated.

While a thread records, arrays are `RecordedArray`s. NumPy passes each call on such an array to the class, which makes
the call and appends it to the tape together with the array that received the result. Repeating the calls in the same
memory computes the function for the present values of its inputs. Views need no call. Reading the memory
of such an array in any other way, as `np.asarray(x)` does, raises CaptureError.

Layers use the functions of `array_namespace(x)`, here those of `RecordingNamespace`. Kernels that are written for NumPy
use `empty`, `zeros` and `contiguous` of this module.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import operator
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from xformer.errors import CaptureError


class Call(NamedTuple):
    """One elementary call of a recording; it writes into one of its arguments."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    keywords: dict[str, Any]


class Tape:
    """The calls of a recording.

    Attributes:
        calls: The calls, in order.
        temporaries: Arrays that the function allocates, by id. Their contents need not survive from one replay to the
            next.
    """

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.temporaries: dict[int, Any] = {}

    def append(self, function: Callable[..., Any], args: tuple[Any, ...], **keywords: Any) -> None:
        """Append a call that has been made."""
        self.calls.append(Call(function, plain(args), plain(keywords)))

    def own(self, array: Any) -> RecordedArray:
        """Add a new array to the temporaries; return it as a RecordedArray."""
        root = array
        while isinstance(root.base, np.ndarray):
            root = root.base
        self.temporaries[id(root)] = root
        return RecordedArray(array)

    def append_result(self, result: Any, function: Callable[..., Any], args: Any, keywords: Any) -> Any:
        """Append a call that returned `result`, unless this is a view of an argument; return it recorded."""
        if result is None or keywords.get("out") is not None:  # it has written into an argument
            self.append(function, args, **keywords)
            return recorded(plain(result))
        if isinstance(result, tuple | list):
            items = (self.append_result(x, _item(function, i), args, keywords) for i, x in enumerate(result))
            return type(result)(*items) if hasattr(result, "_fields") else type(result)(items)
        if not isinstance(result, np.ndarray | np.generic):
            return result
        if any(isinstance(x, np.ndarray) and np.may_share_memory(x, result) for x in _flat((args, keywords))):
            return RecordedArray(result)
        result = np.asarray(result)
        _appender(function)(self, result, function, args, keywords)
        return self.own(result)


# The tape of each thread that records.
_tapes: dict[int, Tape] = {}


def current_tape() -> Tape | None:
    """Return the tape of this thread, or None if it does not record."""
    return _tapes.get(threading.get_ident()) if _tapes else None


@contextlib.contextmanager
def recording() -> Iterator[Tape]:
    """Record the calls of this thread on arrays returned by `recorded`, until the block ends.

    Raises:
        CaptureError: If the thread records already.
    """
    thread = threading.get_ident()
    if thread in _tapes:
        raise CaptureError("a captured function calls another captured function; capture the outer one only")
    _tapes[thread] = tape = Tape()
    try:
        yield tape
    finally:
        del _tapes[thread]


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """Record nothing inside the block."""
    thread = threading.get_ident()
    tape = _tapes.pop(thread)
    try:
        yield
    finally:
        _tapes[thread] = tape


class RecordedArray(np.lib.mixins.NDArrayOperatorsMixin):
    """An array of the thread that records. Without a tape it behaves as a plain one and returns plain results.

    It is not an ndarray, so everything in NumPy that would read its memory without a call of this class raises.
    """

    __slots__ = ("array",)

    def __init__(self, array: Any) -> None:
        if array.dtype.hasobject:
            raise CaptureError("the captured function computes arrays of dtype object; convert them outside")
        self.array = array

    def __getattr__(self, name: str) -> Any:
        if name in _ATTRIBUTES:
            return getattr(self.array, name)
        if name in _VIEWS:
            return RecordedArray(getattr(self.array, name))
        if name in {"max", "mean", "min", "sum"}:
            return functools.partial(getattr(np, name), self)
        if name in _METHODS:
            return functools.partial(self._call, getattr(np.ndarray, name))
        if name.startswith("__") or not hasattr(np.ndarray, name):
            raise AttributeError(f"arrays have no attribute {name!r}", name=name, obj=self)
        return self._read()

    def _call(self, method: Callable[..., Any], *args: Any, **keywords: Any) -> Any:
        args, keywords = (self.array, *plain(args)), plain(keywords)
        tape, result = current_tape(), method(*args, **keywords)
        return result if tape is None else tape.append_result(result, method, args, keywords)

    def __array_namespace__(self, *, api_version: str | None = None) -> Any:
        """Return the namespace that records."""
        return NAMESPACE

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, out: Any = None, **keywords: Any) -> Any:
        """Call a ufunc, or its methods reduce, accumulate, reduceat and at."""
        tape = current_tape()
        if tape is not None:
            _check_recorded(inputs[:1] if method == "at" else out or ())
        inputs, keywords, out = plain(inputs), plain(keywords), plain(out)
        function = ufunc if method == "__call__" else getattr(ufunc, method)
        if tape is None:
            return function(*inputs, **keywords) if out is None else function(*inputs, out=out, **keywords)
        if method == "at":
            function(*inputs, **keywords)
            tape.append(function, inputs, **keywords)
            return None
        if out is None:
            result = function(*inputs, **keywords)
            results = tuple(map(np.asarray, result if isinstance(result, tuple) else (result,)))
            recorded_results = tuple(map(tape.own, results))
        else:
            function(*inputs, out=out, **keywords)
            results, recorded_results = out, tuple(map(RecordedArray, out))
        keywords = {name: value for name, value in keywords.items() if value is not np._NoValue}
        if method == "__call__" and ufunc not in (np.maximum, np.minimum):  # their output is keyword-only
            tape.append(function, (*inputs, *results), **keywords)
        else:
            tape.append(function, inputs, **keywords | {"out": results[0]})
        return recorded_results[0] if len(recorded_results) == 1 else recorded_results

    def __array_function__(self, function: Any, types: Any, args: Any, keywords: Any) -> Any:
        """Call a function of NumPy and record it as one call."""
        tape = current_tape()
        if tape is None:
            return function(*plain(args), **plain(keywords))
        if function in _REDUCTIONS and len(args) == 1 and all(keywords.get(name) is None for name in _NOT_REDUCED):
            total = self.__array_ufunc__(_REDUCTIONS[function], "reduce", *args, **{"axis": None} | keywords)
            if function is not np.mean:  # the elementary calls replay without Python code of NumPy
                return total
            if total.dtype.kind == "f" and total.itemsize > 2:
                return np.true_divide(total, args[0].size / max(total.size, 1), out=total)
        written = keywords.get("out")
        _check_recorded(args[:1] if function in _WRITES else () if written is None else (written,))
        args, keywords = plain(args), plain(keywords)
        if function in _FILLS:
            result = function(*args, **keywords)
            if _FILLS[function] is not None:
                tape.append(np.ndarray.fill, (result, _FILLS[function]))
            return tape.own(result)
        result = function(*args, **keywords)
        is_number = isinstance(result, bool | int | float | complex) and not isinstance(result, np.generic)
        if (is_number or isinstance(result, str | list)) and function not in _METADATA:
            return self._read()
        return tape.append_result(result, function, args, keywords)

    def __getitem__(self, key: Any) -> Any:
        tape = current_tape()
        if tape is not None and any(type(i) is RecordedArray and i.dtype == np.bool_ for i in _flat(key)):
            raise CaptureError(
                "the captured function indexes with a boolean array, which returns an array whose size depends on "
                "values; use xp.where(mask, x, 0) of xp = array_namespace(x)"
            )
        x, key = self.array, plain(key)
        result = x[key]
        if tape is None:
            return result
        if not isinstance(result, np.ndarray):  # a view of no axes instead of a NumPy scalar
            key = (*key, ...) if isinstance(key, tuple) else (key, ...)
            result = x[key]
        return tape.append_result(result, np.ndarray.__getitem__, (x, key), {})

    def __setitem__(self, key: Any, value: Any) -> None:
        x, key, value = self.array, plain(key), plain(value)
        x[key] = value
        tape = current_tape()
        if tape is not None:
            tape.append(operator.setitem, (x, key, value))

    def __len__(self) -> int:
        return len(self.array)

    def __iter__(self) -> Iterator[Any]:
        return (self[index] for index in range(len(self.array)))

    def _read(self, *args: Any, **keywords: Any) -> Any:
        if current_tape() is None:
            raise TypeError("a RecordedArray was used after the recording; return arrays from the captured function")
        raise CaptureError(
            "the captured function reads values of an array on the host (by float(x), bool(x), np.asarray(x), "
            "print(x), x.tolist(), an assignment to a plain array or similar), which may differ in a replay; use "
            "functions of array_namespace(x), or pass the number as an argument"
        )

    __bool__ = __int__ = __float__ = __complex__ = __index__ = __array__ = __format__ = __str__ = _read

    def __repr__(self) -> str:
        return f"RecordedArray({self.shape}, {self.dtype})"


def _check_recorded(targets: Any) -> None:
    """Raise CaptureError if a recorded value is written into a plain array, whose later uses are not recorded."""
    for target in targets:
        if isinstance(target, np.ndarray):
            raise CaptureError(
                "the captured function writes values of an argument into a plain array; make it by xp.zeros or "
                "xp.zeros_like of xp = array_namespace(x)"
            )


_ATTRIBUTES = {"base", "ctypes", "device", "dtype", "flags", "itemsize", "nbytes", "ndim", "shape", "size", "strides"}
_VIEWS = {"T", "mT"}
_METHODS = {
    *("all", "any", "argmax", "argmin", "argpartition", "argsort", "astype", "choose", "clip", "compress", "copy"),
    *("cumprod", "cumsum", "diagonal", "dot", "fill", "flatten", "partition", "prod", "put"),
    *("ravel", "repeat", "reshape", "round", "searchsorted", "sort", "squeeze", "std", "sum", "swapaxes", "take"),
    *("trace", "transpose", "var", "view"),
}
_REDUCTIONS = {np.sum: np.add, np.mean: np.add, np.max: np.maximum, np.min: np.minimum}
_NOT_REDUCED = ("dtype", "out", "where")
_WRITES = {np.copyto, np.fill_diagonal, np.place, np.put, np.put_along_axis, np.putmask}
# Their results, numbers or lists, do not depend on values.
_METADATA = {np.shape, np.ndim, np.size, np.may_share_memory, np.shares_memory, np.iscomplexobj, np.isrealobj}
_METADATA |= {np.can_cast, np.broadcast_arrays, np.split, np.array_split, np.hsplit, np.vsplit, np.dsplit}
_FILLS: dict[Any, Any] = {np.empty_like: None, np.zeros_like: 0, np.ones_like: 1}


# --- calls that compute a result again ----------------------------------------------------------------------------


def _append_copy(tape: Tape, result: Any, function: Any, args: Any, keywords: Any) -> None:
    def call(target: Any, args: Any, keywords: Any) -> None:
        value = function(*args, **keywords)
        if np.shape(value) != target.shape:
            name = getattr(function, "__name__", "a function")
            raise CaptureError(
                f"{name} returned an array of shape {np.shape(value)} in a replay and {target.shape} in the recording; "
                "a captured function must not compute shapes from values"
            )
        target[...] = value

    tape.append(call, (result, args, keywords))


def _item(function: Callable[..., Any], index: int) -> Callable[..., Any]:
    """Return a function that returns one item of the result of `function`."""

    @functools.wraps(function)
    def call(*args: Any, **keywords: Any) -> Any:
        return function(*args, **keywords)[index]

    return call


def _append_out(tape: Tape, result: Any, function: Any, args: Any, keywords: Any) -> None:
    tape.append(function, args, **keywords | {"out": result})


def _append_take(tape: Tape, result: Any, function: Any, args: Any, keywords: Any) -> None:
    settings = dict(zip(("a", "indices", "axis"), args, strict=False)) | keywords
    x, indices, axis = settings.pop("a"), np.asarray(settings.pop("indices")), settings.pop("axis", None)
    if settings.get("mode", "raise") == "raise":  # this mode copies through a buffer
        tape.append(_check_indices, (indices, x.size if axis is None else x.shape[axis]))
        settings["mode"] = "wrap"
    tape.append(np.take, (x, indices), **settings | {"axis": axis, "out": result})


def _check_indices(indices: Any, size: int) -> None:
    if indices.max(initial=0) >= size or indices.min(initial=0) < -size:
        raise IndexError(f"indices range from {indices.min()} to {indices.max()}; expected {-size} to {size - 1}")


def _append_cast(tape: Tape, result: Any, function: Any, args: Any, keywords: Any) -> None:
    tape.append(np.copyto, (result, args[0], "unsafe"))


def _append_where(tape: Tape, result: Any, function: Any, args: Any, keywords: Any) -> None:
    if len(args) != 3:
        _append_copy(tape, result, function, args, keywords)
    else:
        tape.append(np.copyto, (result, args[2]))
        tape.append(np.copyto, (result, args[1], "same_kind", args[0]))


_APPENDERS = {
    "where": _append_where,
    **dict.fromkeys(("take",), _append_take),
    **dict.fromkeys(("all", "any", "argmax", "argmin", "clip", "concatenate", "cumsum", "max", "min"), _append_out),
    **dict.fromkeys(("prod", "stack", "sum"), _append_out),
    **dict.fromkeys(("astype", "copy"), _append_cast),
}


def _appender(function: Any) -> Callable[..., None]:
    return _APPENDERS.get(getattr(function, "__name__", ""), _append_copy)


# --- plain and recorded values ------------------------------------------------------------------------------------


def plain(value: Any) -> Any:
    """Return a value with plain arrays instead of RecordedArrays, also in tuples, lists and dicts."""
    return value.array if type(value) is RecordedArray else _map(plain, value)


def recorded(value: Any) -> Any:
    """Return a value with RecordedArrays instead of plain arrays, also in tuples, lists and dicts."""
    return RecordedArray(value) if type(value) is np.ndarray else _map(recorded, value)


def _map(function: Callable[[Any], Any], value: Any) -> Any:
    """Apply a function to the items of a tuple, list or dict; return other values as they are."""
    cls = type(value)
    if cls is tuple or cls is list:
        return cls(map(function, value))
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return cls(*map(function, value))
    return {name: function(item) for name, item in value.items()} if cls is dict else value


def _flat(value: Any) -> Iterator[Any]:
    """Yield the items of nested tuples, lists and dicts."""
    if isinstance(value, dict):
        value = tuple(value.values())
    if isinstance(value, tuple | list):
        for item in value:
            yield from _flat(item)
    else:
        yield value


def has_recorded(value: Any) -> bool:
    """Return whether a RecordedArray is among nested values."""
    return any(type(item) is RecordedArray for item in _flat(value))


# --- allocation and calls in kernels ------------------------------------------------------------------------------


def empty(shape: Any, dtype: Any) -> Any:
    """Allocate an array, as `np.empty`."""
    array, tape = np.empty(shape, dtype), _tapes and current_tape()
    return tape.own(array) if tape else array


def zeros(shape: Any, dtype: Any) -> Any:
    """Allocate an array of zeros, as `np.zeros`."""
    array = empty(shape, dtype)
    if type(array) is np.ndarray:
        return np.zeros(shape, dtype)
    array.fill(0)
    return array


def contiguous(x: Any, dtype: Any = None) -> Any:
    """Return `x` in C order, as `np.ascontiguousarray`; no copy if it is."""
    tape = _tapes and current_tape()
    if not tape:
        return np.ascontiguousarray(x, dtype)
    x = plain(x)
    return tape.append_result(np.ascontiguousarray(x, dtype), np.ascontiguousarray, (x, dtype), {})


def call_on_host(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function that reads values of plain arrays on the host, and returns arrays or None.

    If the thread records and an argument is recorded, each replay calls the function again.
    """
    tape = current_tape()
    if tape is None or not has_recorded(args):
        return function(*plain(args))
    args = plain(args)
    with paused():
        result = function(*args)
    if result is None:
        return tape.append(function, args)
    return tape.append_result(result, function, args, {})


# --- the namespace of recorded arrays -------------------------------------------------------------------------------


class RecordingNamespace:
    """The functions of NumPy for RecordedArrays: plain arrays beside a recorded one are recorded too."""

    __name__ = "array_api_compat.numpy"
    trace_level = 0

    def __getattr__(self, name: str) -> Any:
        """Bind a function at its first use."""
        function = getattr(importlib.import_module(self.__name__), name)
        if callable(function) and not isinstance(function, type):
            function = _bind_creation(function) if name in _CREATION else _bind(function)
            setattr(self, name, function)
        return function


_CREATION = ("empty", "full", "ones", "zeros")


def _bind_creation(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a creation function whose arrays are filled again in each replay, since they may be written to."""

    @functools.wraps(function)
    def call(*args: Any, **keywords: Any) -> Any:
        tape, result = current_tape(), function(*args, **keywords)
        if tape is None:
            return result
        if function.__name__ != "empty" and result.size:
            tape.append(np.ndarray.fill, (result, result.flat[0]))
        return tape.own(result)

    return call


def _bind(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **keywords: Any) -> Any:
        tape = current_tape()
        if tape is None:
            return function(*plain(args), **plain(keywords))
        if not has_recorded((args, keywords)):
            return function(*args, **keywords)
        num_calls = len(tape.calls)
        try:
            return function(*recorded(args), **recorded(keywords))
        except (AttributeError, CaptureError, TypeError):  # it needs an ndarray: record it as one call
            del tape.calls[num_calls:]
            with paused():
                result = function(*plain(args), **plain(keywords))
            return tape.append_result(result, function, plain(args), plain(keywords))

    return call


NAMESPACE = RecordingNamespace()
