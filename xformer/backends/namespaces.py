"""The namespace of an array library: found by name, by module or from arrays."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import math
import pkgutil
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import array_api_compat

from xformer.backends.array_types import Namespace
from xformer.backends.library import CLASSES, LIBRARIES, Library
from xformer.environment import on_clear
from xformer.errors import BackendError, how_to_install

# The names that users pass as `xp`, and the modules whose functions follow the standard.
_STANDARD_MODULES = {
    "numpy": "array_api_compat.numpy",
    "cupy": "xformer.backends.cupy_namespace",
    "torch": "array_api_compat.torch",
    "jax": "jax.numpy",
    "array_api_strict": "array_api_strict",
    "mlx": "xformer.backends.mlx_namespace",
    "ndonnx": "ndonnx",
}
BACKENDS = tuple(_STANDARD_MODULES)

# Functions that a forward pass needs and nothing can replace.
_REQUIRED = (
    *("abs", "arange", "argmax", "asarray", "astype", "bool", "broadcast_to", "concat", "exp", "expand_dims", "finfo"),
    *("float32", "int64", "log", "matmul", "matrix_transpose", "max", "mean", "permute_dims", "reshape", "sqrt", "sum"),
    *("take", "where", "zeros"),
)

# jax defines its array classes in jaxlib and jax._src.
_BACKEND_OF_ROOT = {**{name: name for name in BACKENDS}, "jaxlib": "jax"}

TRACED: Any = object()
"""Stands for the namespace of a class of traced arrays: each array has its own."""
_ASK_THE_ARRAY: Any = object()
NAMESPACE_OF_TYPE: dict[type, Namespace] = {}

_LIBRARIES: dict[str, Library] = {}  # known ones that are loaded, by name
_ON_LOAD: list[Callable[[Library], None]] = []


@on_clear
def _forget_kernels() -> None:
    for library in LIBRARIES:
        library.kernels.clear()


def resolve(xp: Any) -> Namespace:
    """Return the standard namespace of an array library.

    Args:
        xp: A module that follows the Array API standard, such as `numpy`, `cupy`, `torch`, `jax.numpy`, `mlx.core` or
            `dpnp`, its array-api-compat counterpart, or its name ("jax" and "mlx" stand for the modules above).

    Raises:
        BackendError: If the library is not installed (with the command that installs it), or lacks functions.
    """
    if isinstance(xp, Library) or getattr(xp, "is_trace", False):
        return xp
    if isinstance(xp, str):
        if _is_known(xp):
            return _load(xp)
        xp = _import_other(xp)
    root = getattr(xp, "__name__", "").removeprefix("array_api_compat.").split(".")[0]
    return _load(root) if _is_known(root) else complete(xp)


def resolve_known(name: str) -> Namespace:
    """Return a namespace by a name that comes from a file, which must not import an arbitrary module.

    Raises:
        BackendError: Unless the library is built in, registered, or imported by the program.
    """
    if not _is_known(name) and name not in sys.modules:
        raise BackendError(f"backend {name!r} is unknown; expected one of {', '.join(known_backends())}")
    return resolve(name)


@functools.cache
def known_backends() -> Mapping[str, str]:
    """Return the module with the standard's functions for each library that is built in or registered.

    A package registers a library by an entry point of the group "xformer.backends": its name is the root package of the
    arrays' class, and its value is the module with the standard's functions. That module may call `register_backend`.
    """
    from importlib import metadata  # which takes longer to import than most of xformer

    registered = metadata.entry_points(group="xformer.backends")
    return {**_STANDARD_MODULES, **{each.name: each.value for each in registered if each.name not in BACKENDS}}


def _is_known(name: str) -> bool:
    return name in _STANDARD_MODULES or name in known_backends()  # reading the entry points takes milliseconds


def _load(name: str) -> Library:
    """Return a known library."""
    library = _LIBRARIES.get(name)
    if library is None:
        module = _import(name)
        library = _LIBRARIES[name] = CLASSES.get(name, Library)(name, module)
        for callback in _ON_LOAD:
            callback(library)
    return library


def on_load(callback: Callable[[Library], None]) -> None:
    """Call a function with each library: now with those that are loaded, and later with each that is loaded."""
    _ON_LOAD.append(callback)
    for library in loaded_libraries():
        callback(library)


def loaded_libraries() -> list[Library]:
    """Return the libraries that are loaded."""
    return list(LIBRARIES)


def _import(name: str) -> ModuleType:
    """Import the functions of a known library and what xformer knows about it."""
    try:
        if name == "numpy":
            _defer("numpy.f2py", "numpy.testing")  # array_api_compat imports them, which takes longer than NumPy itself
        module = importlib.import_module(_STANDARD_MODULES.get(name) or known_backends()[name])
        if name in _STANDARD_MODULES:
            importlib.import_module(f"xformer.backends.{name}")
    except ImportError as error:
        if importlib.util.find_spec(name) is not None:
            raise BackendError(f"backend {name!r} is installed but cannot be imported: {error}") from error
        raise BackendError(f"backend {name!r} is not installed; {how_to_install(name)}") from error
    return module


def _defer(*names: str) -> None:
    """Let modules be imported at the first use of their attributes."""
    for name in names:
        if name not in sys.modules and (spec := importlib.util.find_spec(name)) and spec.loader:
            spec.loader = importlib.util.LazyLoader(spec.loader)
            sys.modules[name] = module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            parent, _, child = name.rpartition(".")
            setattr(sys.modules[parent], child, module)


def _import_other(name: str) -> Namespace:
    try:
        return pkgutil.resolve_name(name)  # a module, or an attribute of one, such as marray.numpy
    except (ImportError, ValueError, AttributeError) as error:  # ValueError for an empty name
        if isinstance(error, ImportError) and _is_installed(name):
            raise BackendError(f"backend {name!r} is installed but cannot be imported: {error}") from error
        raise BackendError(
            f"backend {name!r} is unknown; expected one of {', '.join(known_backends())}, or the name of another "
            f"module that follows the Array API standard; a device or a dtype is passed as device={name!r} or dtype=..."
        ) from error


def _is_installed(name: str) -> bool:
    root = name.split(".")[0]
    return root.isidentifier() and importlib.util.find_spec(root) is not None


@functools.cache
def complete(xp: Any) -> Library:
    """Return a library that xformer does not know, with missing functions composed of others.

    Args:
        xp: A module, or an object with the functions of the standard. If it has no `__array_namespace_info__`,
            array-api-compat's counterpart is used where there is one, e.g. for `dask.array`.

    Raises:
        BackendError: If functions are missing that cannot be composed.
    """
    if not hasattr(xp, "__array_namespace_info__"):
        with contextlib.suppress(ImportError):
            xp = importlib.import_module(f"array_api_compat.{getattr(xp, '__name__', '')}")
    missing = [name for name in _REQUIRED if not hasattr(xp, name)]
    if missing:
        raise BackendError(
            f"xp is {xp!r}; expected one of {', '.join(known_backends())}, as a module or by name, or another module "
            f"that follows the Array API standard; it lacks {', '.join(missing[:5])}; a device or a dtype is passed as "
            "device=... or dtype=..."
        )
    composed = {name: function for name, function in _COMPOSED.items() if not hasattr(xp, name)}
    root = xp.__name__.removeprefix("array_api_compat.").split(".")[0]
    name = _BACKEND_OF_ROOT.get(root, xp.__name__)
    return CLASSES.get(name, Library)(name, xp, composed)


def load_imported() -> None:
    """Load the libraries that the program has imported by now."""
    for name in BACKENDS:
        if name in sys.modules and name not in _LIBRARIES:
            _load(name)


def array_namespace(*arrays: Any) -> Namespace:
    """Return the common namespace of `arrays`; None and Python scalars are ignored.

    Arrays under differentiation carry their own namespace. Among several the innermost trace wins, since its operations
    accept plain arrays and arrays of outer traces as constants.

    Raises:
        BackendError: If arrays of two libraries are mixed, or if there is no array.
    """
    result: Namespace | None = None
    for array in arrays:
        namespace = NAMESPACE_OF_TYPE.get(type(array))
        if namespace is TRACED:
            namespace = array._namespace
        elif namespace is None:
            if array is None or isinstance(array, bool | int | float | complex):
                continue
            namespace = _namespace_of_new_type(array)
        if namespace is _ASK_THE_ARRAY:
            namespace = complete(array.__array_namespace__())
        if result is None or result is namespace:
            result = namespace
        else:
            result = _innermost(result, namespace)
    if result is None:
        if any(hasattr(array, "dtype") for array in arrays):
            return _load("numpy")  # numpy.float64 is a Python float; it decides only if nothing else does
        types = ", ".join(type(array).__name__ for array in arrays)
        raise BackendError(f"no array among the arguments ({types}); expected at least one array")
    return result


def _namespace_of_new_type(array: Any) -> Namespace:
    """Find the namespace for a type that was not seen before, and remember it."""
    cls, namespace = type(array), _ASK_THE_ARRAY
    name = _BACKEND_OF_ROOT.get(cls.__module__.split(".")[0])
    if name is not None and hasattr(array, "dtype") and hasattr(array, "shape"):
        namespace = _load(name)
    elif hasattr(cls, "__array_namespace__"):
        own = array.__array_namespace__()
        if isinstance(own, ModuleType):  # masked arrays have one class and several namespaces
            namespace = resolve(own)
    elif not isinstance(array, type) and array_api_compat.is_array_api_obj(array):  # e.g. of Dask
        namespace = resolve(array_api_compat.array_namespace(array))
    else:
        raise BackendError(
            f"got a {cls.__module__}.{cls.__name__}; expected an array of {', '.join(BACKENDS)}; use xp.asarray"
        )
    NAMESPACE_OF_TYPE[cls] = namespace
    return namespace


def _innermost(first: Namespace, second: Namespace) -> Namespace:
    """Choose the inner one of two traces of a library, or the one that records; two libraries cannot be mixed."""
    names = first.library.name, second.library.name
    if names[0] != names[1]:
        raise BackendError(
            f"arrays of {names[0]} and {names[1]} were mixed; move one over, e.g. model.to(xp) or xp.asarray(...)"
        )
    is_inner = (second.trace_level, second.is_trace) > (first.trace_level, first.is_trace)
    return second if is_inner else first


def take_along_axis(x: Any, indices: Any, /, *, axis: int = -1) -> Any:
    """Take elements by `take` of a flat array, for libraries such as Dask that lack the function."""
    xp = array_namespace(x, indices)
    rows, chosen = (xp.moveaxis(array, axis, -1) for array in (x, indices))
    count, size = math.prod(chosen.shape[:-1]), rows.shape[-1]
    rows = xp.broadcast_to(rows, (*chosen.shape[:-1], size))
    offsets = xp.reshape(xp.arange(count, dtype=indices.dtype) * size, (*chosen.shape[:-1], 1))
    flat = xp.reshape(xp.where(chosen < 0, chosen + size, chosen) + offsets, (-1,))
    taken = xp.take(xp.reshape(rows, (-1,)), flat, axis=0)
    return xp.moveaxis(xp.reshape(taken, chosen.shape), -1, axis)


_COMPOSED = {"take_along_axis": take_along_axis}
