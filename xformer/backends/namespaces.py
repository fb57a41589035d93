"""The namespace of an array library: found by name, by module or from arrays."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from types import ModuleType
from typing import Any

from xformer.backends.array_types import Namespace
from xformer.errors import BackendError, how_to_install

# The names that users pass as `xp`, and the modules whose functions follow the standard.
_STANDARD_MODULES = {
    "numpy": "array_api_compat.numpy",
    "cupy": "xformer.backends.cupy_namespace",
    "torch": "array_api_compat.torch",
    "jax": "jax.numpy",
    "array_api_strict": "array_api_strict",
}
BACKENDS = tuple(_STANDARD_MODULES)

# jax defines its array classes in jaxlib and jax._src.
_BACKEND_OF_ROOT = {**{name: name for name in BACKENDS}, "jaxlib": "jax"}
_BACKEND_OF_NAMESPACE = {"xformer.backends.cupy_namespace": "cupy"}

_ASK_THE_ARRAY: Any = object()
_NAMESPACE_OF_TYPE: dict[type, Namespace] = {}


def resolve(xp: str | ModuleType | Namespace) -> Namespace:
    """Return the standard namespace of an array library.

    Args:
        xp: A module (`numpy`, `cupy`, `torch`, `jax.numpy`, `array_api_strict`), its array-api-compat counterpart, or a
            name ("numpy", "cupy", "torch", "jax", "array_api_strict").

    Raises:
        BackendError: If the library is unknown or not installed (with the command that installs it).
    """
    if isinstance(xp, str):
        return _import(xp)
    if is_trace(xp):
        return xp
    root = getattr(xp, "__name__", "").removeprefix("array_api_compat.").split(".")[0]
    if root in _STANDARD_MODULES:
        return _import(root)
    if hasattr(xp, "__array_namespace_info__"):
        return xp
    raise BackendError(f"xp is {xp!r}; expected one of {', '.join(BACKENDS)}, as a module or by name")


def _import(name: str) -> Namespace:
    """Import the namespace of a library and what xformer knows about it."""
    if name not in _STANDARD_MODULES:
        raise BackendError(f"backend {name!r} is unknown; expected one of {', '.join(BACKENDS)}")
    try:
        if name == "numpy":
            _defer("numpy.f2py", "numpy.testing")  # array_api_compat imports them, which takes longer than NumPy itself
        namespace = importlib.import_module(_STANDARD_MODULES[name])
        importlib.import_module(f"xformer.backends.{name}")
    except ImportError as error:
        if importlib.util.find_spec(name) is not None:
            raise BackendError(f"backend {name!r} is installed but cannot be imported: {error}") from error
        raise BackendError(f"backend {name!r} is not installed; {how_to_install(name)}") from error
    return namespace


def _defer(*names: str) -> None:
    """Let modules be imported at the first use of their attributes."""
    for name in names:
        if name not in sys.modules and (spec := importlib.util.find_spec(name)) and spec.loader:
            spec.loader = importlib.util.LazyLoader(spec.loader)
            sys.modules[name] = module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            parent, _, child = name.rpartition(".")
            setattr(sys.modules[parent], child, module)


def load_imported_backends() -> None:
    """Load what xformer knows about the libraries that the program has imported by now."""
    for name in BACKENDS:
        if name in sys.modules and f"xformer.backends.{name}" not in sys.modules:
            _import(name)


def array_namespace(*arrays: Any) -> Namespace:
    """Return the common namespace of `arrays`; None and Python scalars are ignored.

    Arrays under differentiation carry their own namespace. Among several the innermost trace wins, since its operations
    accept plain arrays and arrays of outer traces as constants.

    Raises:
        BackendError: If arrays of two libraries are mixed, or if there is no array.
    """
    result: Namespace | None = None
    for array in arrays:
        namespace = _NAMESPACE_OF_TYPE.get(type(array))
        if namespace is None:
            if array is None or isinstance(array, bool | int | float | complex):
                continue
            namespace = _namespace_of_new_type(array)
        if namespace is _ASK_THE_ARRAY:
            namespace = array.__array_namespace__()
        if result is None or result is namespace:
            result = namespace
        else:
            result = _innermost(result, namespace)
    if result is None:
        if any(hasattr(array, "dtype") for array in arrays):
            return _import("numpy")  # numpy.float64 is a Python float; it decides only if nothing else does
        types = ", ".join(type(array).__name__ for array in arrays)
        raise BackendError(f"no array among the arguments ({types}); expected at least one array")
    return result


def _namespace_of_new_type(array: Any) -> Namespace:
    """Find the namespace for a type that was not seen before, and remember it."""
    cls = type(array)
    name = _BACKEND_OF_ROOT.get(cls.__module__.split(".")[0])
    if name is not None and hasattr(array, "dtype") and hasattr(array, "shape"):
        namespace = _import(name)
    elif hasattr(cls, "__array_namespace__"):
        namespace = _ASK_THE_ARRAY
    else:
        raise BackendError(
            f"got a {cls.__module__}.{cls.__name__}; expected an array of {', '.join(BACKENDS)}; use xp.asarray"
        )
    _NAMESPACE_OF_TYPE[cls] = namespace
    return namespace


def _innermost(first: Namespace, second: Namespace) -> Namespace:
    """Choose the inner one of two traces of a library, or the one that records; two libraries cannot be mixed."""
    if backend_name(first) != backend_name(second):
        raise BackendError(
            f"arrays of {backend_name(first)} and {backend_name(second)} were mixed; move one over, "
            "e.g. model.to(xp) or xp.asarray(...)"
        )
    return max(first, second, key=lambda xp: (trace_level(xp), type(xp) is not ModuleType))


def base_namespace(xp: Namespace) -> Namespace:
    """Return the plain namespace of the library under all traces of `xp`."""
    while trace_level(xp):
        xp = xp.base
    return xp


def trace_level(xp: Namespace) -> int:
    """Return the number of nested differentiations in `xp`: 0 for a plain library."""
    return 0 if type(xp) is ModuleType else getattr(xp, "trace_level", 0)  # getattr on a module is slow


def is_trace(xp: Namespace) -> bool:
    """Return whether a namespace records what its functions compute, for a derivative or for `jit`."""
    return type(xp) is not ModuleType and getattr(xp, "is_trace", False)


def backend_name(xp: Namespace) -> str:
    """Return the name of the library behind a namespace.

    That is "numpy", "cupy", "torch", "jax" or "array_api_strict", or the module's own name for another library.
    """
    name: str = base_namespace(xp).__name__
    if name not in _BACKEND_OF_NAMESPACE:
        root = name.removeprefix("array_api_compat.").split(".")[0]
        _BACKEND_OF_NAMESPACE[name] = _BACKEND_OF_ROOT.get(root, name)
    return _BACKEND_OF_NAMESPACE[name]
