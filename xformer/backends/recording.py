"""Recording of NumPy calls: every elementary call of a function is appended to a tape and can be repeated.

While a thread records, arrays are `RecordedArray`s. NumPy passes each call on such an array to the class, which makes
the call and appends it to the tape together with the array that received the result. Repeating the calls in the same
memory computes the function for the present values of its inputs. Views need no call.

NumPy bypasses a subclass in a few functions, which `RecordingNamespace` handles: layers use the functions of
`array_namespace(x)`. Kernels that are written for NumPy use `empty`, `zeros` and `contiguous` of this module.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
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
        return array.view(RecordedArray)

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
            return result.view(RecordedArray)
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


class RecordedArray(np.ndarray):
    """An array of the thread that records. Without a tape it behaves as a plain one and returns plain results."""

    def __array_namespace__(self, *, api_version: str | None = None) -> Any:
        """Return the namespace that records."""
        return NAMESPACE

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, out: Any = None, **keywords: Any) -> Any:
        """Call a ufunc, or its methods reduce, accumulate, reduceat and at."""
        tape = current_tape()
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
            results, recorded_results = out, tuple(each.view(RecordedArray) for each in out)
        keywords = {name: value for name, value in keywords.items() if value is not np._NoValue}
        if method == "__call__" and ufunc not in (np.maximum, np.minimum):  # their output is keyword-only
            tape.append(function, (*inputs, *results), **keywords)
        else:
            tape.append(function, inputs, **keywords | {"out": results[0]})
        return recorded_results[0] if len(recorded_results) == 1 else recorded_results

    def __array_function__(self, function: Any, types: Any, args: Any, keywords: Any) -> Any:
        """Call a function of NumPy and record it: its elementary calls if it is written in Python, else one call."""
        tape = current_tape()
        if tape is None:
            return function(*plain(args), **plain(keywords))
        if function in _READING_FUNCTIONS:
            self._read()
        if function in _PYTHON_FUNCTIONS:
            return super().__array_function__(function, types, args, keywords)
        args, keywords = plain(args), plain(keywords)
        if function in _FILLS:
            result = function(*args, **keywords)
            if _FILLS[function] is not None:
                tape.append(np.ndarray.fill, (result, _FILLS[function]))
            return tape.own(result)
        return tape.append_result(function(*args, **keywords), function, args, keywords)

    def __getitem__(self, key: Any) -> Any:
        tape = current_tape()
        if tape is not None and any(type(i) is RecordedArray and i.dtype == np.bool_ for i in _flat(key)):
            raise CaptureError(
                "the captured function indexes with a boolean array, which returns an array whose size depends on "
                "values; use xp.where(mask, x, 0) of xp = array_namespace(x)"
            )
        x, key = plain(self), plain(key)
        result = x[key]
        if tape is None:
            return result
        if not isinstance(result, np.ndarray):  # a view of no axes instead of a NumPy scalar
            key = (*key, ...) if isinstance(key, tuple) else (key, ...)
            result = x[key]
        return tape.append_result(result, np.ndarray.__getitem__, (x, key), {})

    def __setitem__(self, key: Any, value: Any) -> None:
        x, key, value = plain(self), plain(key), plain(value)
        x[key] = value
        tape = current_tape()
        if tape is None:
            return
        parts = key if isinstance(key, tuple) else (key,)
        if any(isinstance(part, np.ndarray | list) for part in parts):
            tape.append(np.ndarray.__setitem__, (x, key, value))
        else:
            view = x[key] if ... in parts else x[(*parts, ...)]
            tape.append(np.copyto, (view, value, "unsafe"))

    def _read(self, *args: Any, **keywords: Any) -> Any:
        if current_tape() is None:
            raise TypeError("a RecordedArray was used after the recording; return arrays from the captured function")
        raise CaptureError(
            "the captured function reads values of an array on the host (by float(x), bool(x), print(x), x.tolist() or "
            "similar), which may differ in a replay; use functions of array_namespace(x), or pass the number as an "
            "argument"
        )

    __bool__ = __int__ = __float__ = __complex__ = __index__ = tolist = tobytes = item = nonzero = _read
    __format__ = _read


def _method(name: str) -> Callable[..., Any]:
    function = getattr(np.ndarray, name)

    def method(self: RecordedArray, *args: Any, **keywords: Any) -> Any:
        args, keywords = (plain(self), *plain(args)), plain(keywords)
        tape, result = current_tape(), function(*args, **keywords)
        return result if tape is None else tape.append_result(result, function, args, keywords)

    return method


def _method_in_place(name: str) -> Callable[..., Any]:
    function = getattr(np.ndarray, name)

    def method(self: RecordedArray, *args: Any) -> None:
        args = (plain(self), *plain(args))
        function(*args)
        tape = current_tape()
        if tape is not None:
            tape.append(function, args)

    return method


for _name in (
    *("argmax", "argmin", "argpartition", "argsort", "astype", "choose", "compress", "copy", "cumprod", "cumsum"),
    *("diagonal", "dot", "flatten", "ravel", "repeat", "reshape", "round", "searchsorted", "squeeze", "swapaxes"),
    *("take", "trace", "transpose"),
):
    setattr(RecordedArray, _name, _method(_name))
for _name in ("fill", "partition", "put", "sort"):
    setattr(RecordedArray, _name, _method_in_place(_name))

# Written in Python with ufuncs and methods, which are recorded one by one.
_PYTHON_FUNCTIONS = {np.mean, np.sum, np.max, np.min, np.clip, np.take_along_axis, np.stack, np.var}
# They return a Python bool that depends on values.
_READING_FUNCTIONS = {np.allclose, np.array_equal, np.array_equiv}
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


def _append_reshape(tape: Tape, result: Any, function: Any, args: Any, keywords: Any) -> None:
    if keywords.get("order", "C") == "C":
        tape.append(np.copyto, (result.reshape(args[0].shape), args[0]))
    else:
        _append_copy(tape, result, function, args, keywords)


def _append_where(tape: Tape, result: Any, function: Any, args: Any, keywords: Any) -> None:
    if len(args) != 3:
        raise CaptureError("np.where with one argument returns arrays whose size depends on values; pass three")
    tape.append(np.copyto, (result, args[2]))
    tape.append(np.copyto, (result, args[1], "same_kind", args[0]))


_APPENDERS = {
    **dict.fromkeys(("take",), _append_take),
    **dict.fromkeys(("argmax", "argmin", "concatenate", "cumsum"), _append_out),
    **dict.fromkeys(("astype", "copy"), _append_cast),
    "reshape": _append_reshape,
    "where": _append_where,
}


def _appender(function: Any) -> Callable[..., None]:
    return _APPENDERS.get(getattr(function, "__name__", ""), _append_copy)


# --- plain and recorded values ------------------------------------------------------------------------------------


def plain(value: Any) -> Any:
    """Return a value with plain arrays instead of RecordedArrays, also in tuples, lists, dicts and slices."""
    cls = type(value)
    if cls is RecordedArray:
        return value.view(np.ndarray)
    if cls is tuple or cls is list:
        return cls(map(plain, value))
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return cls(*map(plain, value))
    if cls is dict:
        return {name: plain(item) for name, item in value.items()}
    return value


def recorded(value: Any) -> Any:
    """Return a value with RecordedArrays instead of plain arrays, also in tuples, lists and dicts."""
    cls = type(value)
    if cls is np.ndarray:
        return value.view(RecordedArray)
    if cls is tuple or cls is list:
        return cls(map(recorded, value))
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return cls(*map(recorded, value))
    if cls is dict:
        return {name: recorded(item) for name, item in value.items()}
    return value


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
    tape, array = current_tape(), np.empty(shape, dtype)
    return array if tape is None else tape.own(array)


def zeros(shape: Any, dtype: Any) -> Any:
    """Allocate an array of zeros, as `np.zeros`."""
    array = empty(shape, dtype)
    if type(array) is np.ndarray:
        return np.zeros(shape, dtype)
    array.fill(0)
    return array


def contiguous(x: Any, dtype: Any = None) -> Any:
    """Return `x` in C order, as `np.ascontiguousarray`; no copy if it is."""
    tape = current_tape()
    if tape is None:
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
        result = function(*recorded(args), **recorded(keywords))
        if type(result) is not np.ndarray:
            return result
        # The function has left the subclass on its way, so its calls on plain arrays are missing.
        del tape.calls[num_calls:]
        return tape.append_result(result, function, plain(args), plain(keywords))

    return call


NAMESPACE = RecordingNamespace()
