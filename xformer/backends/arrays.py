"""Arrays of any library: devices, and data on its way between the host and a library."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from xformer.backends.array_types import Array, Device, DType, Namespace
from xformer.backends.dtypes import is_floating
from xformer.backends.library import array_namespace, resolve
from xformer.errors import BackendError


def device(array: Array) -> Device:
    """Return the device of an array, as its library names it; None inside jax.jit, where arrays have none."""
    try:
        return array.device
    except (AttributeError, RuntimeError):
        return None


def from_host(xp: Namespace, data: Any, *, dtype: DType | str | None = None, device: Device = None) -> Array:
    """Move host data into a library; see `Library.from_host`."""
    return resolve(xp).library.from_host(data, dtype=dtype, device=device)


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
    library, expected = array_namespace(data).library.name, array_namespace(like).library.name
    if library == expected:
        check_same_device((like, data))
    elif library != "numpy":
        received = f"{subject} an array of {library} and the model one of {expected}"
        raise BackendError(f"{received}; expected an array of that library, a NumPy array or nested lists")
    return data


def to_library_of(data: Any, like: Array, subject: str, *, dtype: DType | None = None) -> Array:
    """Return an array of the library of `like`; a NumPy array or nested lists are moved there and to its device.

    Arguments and errors are those of `as_array`; `dtype` is a dtype of that library, by default that of the data.
    """
    data = as_array(data, like, subject)
    own, library = array_namespace(data), array_namespace(like).library
    if own.library.name != library.name:
        return library.from_host(data, dtype=dtype, device=device(like))
    return data if dtype is None else own.astype(data, dtype, copy=False)


def to_host(array: Array) -> Any:
    """Return an array of any library as a NumPy array; bfloat16 becomes float32. Memory may be shared."""
    return array_namespace(array).to_host(array)


def to_host_together(*arrays: Array) -> list[Any]:
    """Return arrays of one device as NumPy arrays, which are read from it by one transfer.

    Integers among floating arrays must be representable in them, as token ids are (below 2**24).
    """
    xp = array_namespace(*arrays)
    if all(map(xp.is_host_accessible, arrays)):
        return [xp.to_host(array) for array in arrays]
    floating = [array.dtype for array in arrays if is_floating(array.dtype)] or [array.dtype for array in arrays]
    dtype = functools.reduce(lambda a, b: a if a == b else xp.result_type(a, b), floating)
    host: Any = xp.to_host(xp.concat([xp.astype(xp.reshape(array, (-1,)), dtype) for array in arrays]))
    ends = np.cumsum([math.prod(array.shape) for array in arrays])[:-1]
    return [
        part.reshape(array.shape) if is_floating(array.dtype) else part.reshape(array.shape).astype("int64")
        for part, array in zip(np.split(host, ends), arrays, strict=True)
    ]


def is_of_numpy(array: Array) -> bool:
    """Return whether an array is one of NumPy."""
    return array_namespace(array).name == "numpy"


def check_same_device(arrays: Sequence[Array | None]) -> None:
    """Raise BackendError if arrays are on different devices; None is ignored."""
    devices = [device(array) for array in arrays if array is not None]
    if devices == devices[:1] * len(devices):
        return
    names = dict.fromkeys(str(other) for other in devices if other is not None)
    if len(names) > 1:
        problem = f"arrays on different devices were mixed: {', '.join(names)}"
        raise BackendError(f"{problem}; move one over with model.to(device=...)")


CHECKED_CLASSES: set[type] = set()  # of arrays that compute as their library does


def check_class(array: Any) -> None:
    """Raise BackendError for a subclass of np.ndarray, such as np.matrix, whose functions compute something else.

    Every array of a trace is checked; ask before whether its class is in CHECKED_CLASSES.
    """
    if isinstance(array, np.ndarray):
        array_namespace(array)
    CHECKED_CLASSES.add(type(array))


def assign(target: Array, values: Array) -> Array:
    """Copy `values` into `target` in place if the library allows it, and return the array that has them."""
    if not array_namespace(target).is_writable:
        return values
    target[...] = values
    return target
