"""Dtypes and devices of a library, and data on its way between the host and the library."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from xformer.backends.array_types import Array, Device, DType, Namespace
from xformer.backends.backend import backend_of
from xformer.backends.dtypes import dtype_name, is_floating
from xformer.backends.namespaces import array_namespace, backend_name, base_namespace, is_trace, trace_level
from xformer.errors import BackendError, DataError


def dtype_named(xp: Namespace, name: str | DType) -> DType:
    """Return the dtype of `xp` with a name, or with the name of a dtype of any library.

    Raises:
        BackendError: If the library has no such dtype; bfloat16 on NumPy and CuPy requires ml_dtypes.
    """
    name = name if isinstance(name, str) else dtype_name(name)
    return backend_of(xp).dtype(base_namespace(xp), name)


def index_dtype(xp: Namespace) -> DType:
    """Return the dtype of indices: int64, or int32 on jax without x64."""
    return backend_of(xp).canonical_dtype(base_namespace(xp).int64)


def default_float(xp: Namespace, dtype: str | DType | None = None) -> DType:
    """Return the dtype of new parameters: `dtype`, or float32.

    Raises:
        BackendError: If the dtype is not floating-point, or if the library would silently replace it.
    """
    dtype = dtype_named(xp, "float32" if dtype is None else dtype)
    if not is_floating(dtype):
        raise BackendError(f"dtype is {dtype_name(dtype)}; parameters need a floating dtype such as 'float32'")
    if dtype_name(backend_of(xp).canonical_dtype(dtype)) != dtype_name(dtype):
        raise BackendError("jax disables float64 by default; call jax.config.update('jax_enable_x64', True) first")
    return dtype


def device(array: Array) -> Device:
    """Return the device of an array, as its library names it; None inside jax.jit, where arrays have none."""
    try:
        return array.device
    except (AttributeError, RuntimeError):
        return None


def from_host(xp: Namespace, data: Any, *, dtype: DType | str | None = None, device: Device = None) -> Array:
    """Move host data into `xp`; memory is shared if the library can.

    Args:
        xp: Namespace of an array library.
        data: A NumPy array, or nested lists of numbers.
        dtype: Dtype or its name; default that of the data.
        device: Device as the library names it; default the library's default.

    Raises:
        DataError: If nested lists are ragged.
        BackendError: If the device does not exist.
    """
    try:
        host = np.asarray(data)
    except ValueError as error:
        raise DataError("rows differ in length; expected a rectangle, pad the shorter rows with pad_id") from error
    base, backend = base_namespace(xp), backend_of(xp)
    dtype = None if dtype is None else dtype_named(base, dtype)
    try:
        return backend.from_host(base, host, dtype, device)
    except Exception as error:  # each library raises its own exceptions; torch without CUDA asserts
        if device is None or isinstance(error, BackendError):
            raise
        raise BackendError(f"{backend_name(base)} cannot place data on device {device!r}: {error}") from error


def as_array(data: Any, like: Array, subject: str) -> Array:
    """Return an array of the library of `like` unchanged, and a NumPy array or nested lists as a NumPy array.

    Args:
        data: An array or nested lists.
        like: An array of a model, or one that a model computed.
        subject: Start of the error, e.g. "images are".

    Raises:
        DataError: For ragged rows.
        BackendError: For an array of a third library or on another device.
    """
    data = data if hasattr(data, "shape") and hasattr(data, "dtype") else from_host(np, data)
    library, expected = backend_name(array_namespace(data)), backend_name(array_namespace(like))
    if library == expected:
        check_same_device((like, data))
    elif library != "numpy":
        raise BackendError(
            f"{subject} an array of {library} and the model one of {expected}; expected an array of that library, "
            "a NumPy array or nested lists"
        )
    return data


def to_library_of(data: Any, like: Array, subject: str, *, dtype: DType | None = None) -> Array:
    """Return an array of the library of `like`; a NumPy array or nested lists are moved there and to its device.

    Arguments and errors are those of `as_array`; `dtype` is a dtype of that library, by default that of the data.
    """
    data, xp = as_array(data, like, subject), array_namespace(like)
    if backend_name(array_namespace(data)) != backend_name(xp):
        return from_host(xp, data, dtype=dtype, device=device(like))
    return data if dtype is None else array_namespace(data).astype(data, dtype, copy=False)


def to_host(array: Array) -> Any:
    """Return an array of any library as a NumPy array; bfloat16 becomes float32. Memory may be shared."""
    host = backend_of(array_namespace(array)).to_host(array)
    is_bfloat16 = host.dtype.kind == "V" and host.dtype.name == "bfloat16"  # names take longer than kinds
    return host.astype("float32") if is_bfloat16 else host


def is_host_accessible(array: Array) -> bool:
    """Return whether reading values of an array is cheap: no GPU to wait for, and not traced."""
    xp = array_namespace(array)
    return trace_level(xp) == 0 and backend_of(xp).is_host_accessible(array)


def check_range(array: Array, size: int, check: Callable[[Array], None]) -> None:
    """Let `check(array)` raise an error unless all values are in [0, size), where reading them is cheap.

    A function traced by jit is checked in each run.
    """
    xp = array_namespace(array)
    while trace_level(xp):
        array = xp.unwrap(array)
        xp = array_namespace(array)
    if is_trace(xp):
        xp.check_range(array, size, check)
    elif backend_of(xp).is_host_accessible(array):
        check(array)


def call_on_host(function: Callable[..., Any], *arrays: Any) -> Any:
    """Call a function that reads values of arrays on the host, and returns arrays or None.

    It gets plain arrays. While `jit` traces a function, each later run calls it again.
    """
    xp = array_namespace(*arrays)
    return xp.call_on_host(function, *arrays) if is_trace(xp) else function(*arrays)


def to_host_together(*arrays: Array) -> list[Any]:
    """Return arrays of one device as NumPy arrays, which are read from it by one transfer.

    Integers among floating arrays must be representable in them, as token ids are (below 2**24).
    """
    xp = array_namespace(*arrays)
    if all(map(is_host_accessible, arrays)):
        return [to_host(array) for array in arrays]
    floating = [array.dtype for array in arrays if is_floating(array.dtype)] or [array.dtype for array in arrays]
    dtype = functools.reduce(lambda a, b: a if a == b else xp.result_type(a, b), floating)
    host = to_host(xp.concat([xp.astype(xp.reshape(array, (-1,)), dtype) for array in arrays]))
    ends = np.cumsum([math.prod(array.shape) for array in arrays])[:-1]
    return [
        part.reshape(array.shape) if is_floating(array.dtype) else part.reshape(array.shape).astype("int64")
        for part, array in zip(np.split(host, ends), arrays, strict=True)
    ]


def check_same_device(arrays: Sequence[Array | None]) -> None:
    """Raise BackendError if arrays are on different devices; None is ignored."""
    devices = [device(array) for array in arrays if array is not None]
    if all(other == devices[0] for other in devices):
        return
    names = {str(other): other for other in devices if other is not None}
    if len(names) > 1:
        raise BackendError(
            f"arrays on different devices were mixed: {', '.join(names)}; move one over with model.to(device=...)"
        )


CHECKED_CLASSES: set[type] = set()  # of arrays that compute as their library does


def check_class(array: Any) -> None:
    """Raise BackendError for a subclass of np.ndarray, such as np.matrix, whose functions compute something else.

    Every array of a trace is checked; ask before whether its class is in CHECKED_CLASSES.
    """
    cls = type(array)
    is_subclass = isinstance(array, np.ndarray) and cls not in (np.ndarray, np.memmap)
    if is_subclass and backend_name(array_namespace(array)) == "numpy":
        raise BackendError(
            f"an array is a {cls.__module__}.{cls.__name__}, whose functions may compute something else; expected "
            "a plain numpy.ndarray: pass np.asarray(x), or x.filled(value) for a masked array"
        )
    CHECKED_CLASSES.add(cls)


def is_writable(array: Array) -> bool:
    """Return whether xformer may write into an array: its library allows it, and no derivative needs the old values."""
    xp = array_namespace(array)
    return trace_level(xp) == 0 and backend_of(xp).is_writable


def assign(target: Array, values: Array) -> Array:
    """Copy `values` into `target` in place if the library allows it, and return the array that has them."""
    if not is_writable(target):
        return values
    target[...] = values
    return target
