"""Which array library is this, and the few facts about it that the Array API standard leaves out.

Everything else in xformer is written against the standard: `xp = array_namespace(x)`, then `xp.exp(x)`. This
module finds `xp`, moves data in and out of it, and names dtypes and devices the same way for every library.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from xformer.errors import BackendError, DataError, how_to_install

__all__ = [
    "BACKENDS",
    "Array",
    "BackendError",
    "DType",
    "DataError",
    "Device",
    "Namespace",
    "accumulation_dtype",
    "array_namespace",
    "backend_name",
    "base_namespace",
    "default_float",
    "device",
    "dtype_name",
    "dtype_named",
    "from_host",
    "how_to_install",
    "index_dtype",
    "is_floating",
    "is_half_precision",
    "is_host_accessible",
    "is_integer",
    "resolve",
    "same_device",
    "to_host",
    "trace_level",
]

Namespace = Any
Array = Any
DType = Any
Device = Any

# What a user may pass as `xp`, by name; the value is the module whose functions follow the standard.
_STANDARD_MODULE = {
    "numpy": "array_api_compat.numpy",
    "cupy": "xformer.backends.cupy_namespace",
    "torch": "array_api_compat.torch",
    "jax": "jax.numpy",
    "array_api_strict": "array_api_strict",
}
BACKENDS = tuple(_STANDARD_MODULE)

# jax keeps its array classes in jaxlib and jax._src; both are "jax" to a user.
_LIBRARY_OF_ROOT = {**{name: name for name in BACKENDS}, "jaxlib": "jax"}

_NAMESPACE_OF_TYPE: dict[type, Namespace] = {}
_FLOATING = {"float16", "bfloat16", "float32", "float64"}
_DTYPE_NAMES: dict[Any, str] = {}
_LIBRARIES = {"xformer.backends.cupy_namespace": "cupy"}  # by the name of a namespace


def resolve(xp: str | ModuleType | Namespace) -> Namespace:
    """Return the standard namespace for what a user calls an array library.

    xp: a raw module (`numpy`, `cupy`, `torch`, `jax.numpy`, `array_api_strict`), its array-api-compat twin, or
    its name ("numpy", "cupy", "torch", "jax", "array_api_strict").

    Raises BackendError when the library is unknown, or known but not installed (with what to install).
    """
    if isinstance(xp, str):
        return _import(xp)
    root = getattr(xp, "__name__", "").removeprefix("array_api_compat.").split(".")[0]
    if root in _STANDARD_MODULE:
        return _import(root)
    if hasattr(xp, "__array_namespace_info__"):
        return xp
    raise BackendError(f"xp is {xp!r}; expected one of {', '.join(BACKENDS)}, as a module or by name")


def _import(library: str) -> Namespace:
    """Import the standard module of `library`, telling apart "unknown" and "not installed"."""
    if library not in _STANDARD_MODULE:
        raise BackendError(f"backend {library!r} is unknown; expected one of {', '.join(BACKENDS)}")
    try:
        return importlib.import_module(_STANDARD_MODULE[library])
    except ImportError as error:
        if importlib.util.find_spec(library) is not None:
            raise BackendError(f"backend {library!r} is installed but does not import: {error}") from error
        raise BackendError(f"backend {library!r} is not installed; {how_to_install(library)}") from error


def array_namespace(*arrays: Array) -> Namespace:
    """Return the namespace that serves all `arrays`; None and Python scalars have no say.

    Arrays under differentiation carry their own namespace; among several, the innermost trace wins, since its
    operations accept plain arrays and outer traces as constants.

    Raises BackendError when two libraries are mixed, or when no array is given.
    """
    found: Namespace = None
    for array in arrays:
        namespace = _NAMESPACE_OF_TYPE.get(type(array))
        if namespace is None:
            if array is None or isinstance(array, bool | int | float | complex):
                continue
            namespace = _discover(array)
        if namespace is _ASK_THE_ARRAY:
            namespace = array.__array_namespace__()
        if found is None or found is namespace:
            found = namespace
        else:
            found = _innermost(found, namespace)
    if found is None:
        if any(hasattr(array, "dtype") for array in arrays):
            return _import("numpy")  # a numpy.float64 is a Python float as well: it has a say when it is alone
        given = ", ".join(type(array).__name__ for array in arrays)
        raise BackendError(f"no array among the arguments ({given}); expected at least one array")
    return found


_ASK_THE_ARRAY = object()


def _discover(array: Array) -> Namespace:
    """Find the namespace of a type met for the first time, and remember it."""
    kind = type(array)
    library = _LIBRARY_OF_ROOT.get(kind.__module__.split(".")[0])
    if library is not None and (hasattr(array, "dtype") and hasattr(array, "shape")):
        namespace = _import(library)
    elif hasattr(array, "__array_namespace__"):
        namespace = _ASK_THE_ARRAY
    else:
        raise BackendError(f"got a {kind.__module__}.{kind.__name__}; expected an array of {', '.join(BACKENDS)}")
    _NAMESPACE_OF_TYPE[kind] = namespace
    return namespace


def _innermost(first: Namespace, second: Namespace) -> Namespace:
    """Choose between two namespaces: a trace and what it traces fit together, two libraries do not."""
    if backend_name(first) != backend_name(second):
        raise BackendError(
            f"arrays of {backend_name(first)} and {backend_name(second)} were mixed; move one over, "
            "e.g. model.to(xp) or xp.asarray(...)"
        )
    return first if trace_level(first) >= trace_level(second) else second


def base_namespace(xp: Namespace) -> Namespace:
    """Strip every trace: the plain namespace of the library under `xp`."""
    while trace_level(xp):
        xp = xp.base
    return xp


def trace_level(xp: Namespace) -> int:
    """How many differentiations are under way in `xp`: 0 for a plain library."""
    return 0 if type(xp) is ModuleType else getattr(xp, "trace_level", 0)  # operations ask, and a module is slow to say


def backend_name(xp: Namespace) -> str:
    """Name the library behind a namespace: "numpy", "cupy", "torch", "jax", "array_api_strict", or its own name."""
    name: str = base_namespace(xp).__name__
    if name not in _LIBRARIES:
        _LIBRARIES[name] = _LIBRARY_OF_ROOT.get(name.removeprefix("array_api_compat.").split(".")[0], name)
    return _LIBRARIES[name]


def dtype_name(dtype: DType) -> str:
    """Name a dtype the same way for every library: "float32", "bfloat16", "int64", "bool"."""
    # The class is part of the key because dtypes of different libraries must not be compared with each other.
    key = (dtype.__class__, dtype)
    name = _DTYPE_NAMES.get(key)
    if name is None:
        # numpy.float32 and jax.numpy.float32 are classes; the dtype of an array is an instance with a name.
        name = getattr(dtype, "__name__", None) or getattr(dtype, "name", None) or str(dtype)
        name = _DTYPE_NAMES[key] = str(name).rsplit(".", maxsplit=1)[-1]
    return name


def dtype_named(xp: Namespace, name: str | DType) -> DType:
    """Return the dtype called `name` in `xp`; a dtype, of whatever library, stands for its name.

    Raises BackendError when the library has no such dtype; bfloat16 on NumPy and CuPy needs ml_dtypes.
    """
    name = name if isinstance(name, str) else dtype_name(name)
    base = base_namespace(xp)
    if hasattr(base, name):
        return getattr(base, name)
    if name == "bfloat16" and backend_name(base) in ("numpy", "cupy"):
        try:
            return importlib.import_module("numpy").dtype(importlib.import_module("ml_dtypes").bfloat16)
        except ImportError as error:
            raise BackendError(f"bfloat16 needs ml_dtypes; {how_to_install('ml_dtypes')}") from error
    raise BackendError(f"{backend_name(base)} has no dtype {name!r}; expected e.g. 'float32' or 'float64'")


def is_floating(dtype: DType) -> bool:
    """Tell whether a dtype is a real floating type; bfloat16, which the standard does not know, included."""
    return dtype_name(dtype) in _FLOATING


def is_half_precision(dtype: DType) -> bool:
    """Tell whether a dtype is a floating type of 16 bits."""
    return dtype_name(dtype) in ("float16", "bfloat16")


def is_integer(dtype: DType) -> bool:
    """Tell whether a dtype is a signed or unsigned integer (bool is not)."""
    return dtype_name(dtype).startswith(("int", "uint"))


def accumulation_dtype(xp: Namespace, dtype: DType) -> DType:
    """The dtype that sums are kept in: float32 for float16 and bfloat16, else the dtype itself."""
    return xp.float32 if is_half_precision(dtype) else dtype


def index_dtype(xp: Namespace) -> DType:
    """The integer dtype that every library can index with: int64, on jax int32 unless x64 is switched on."""
    return _jax_canonical("int64") if backend_name(xp) == "jax" else base_namespace(xp).int64


def default_float(xp: Namespace, dtype: str | DType | None = None) -> DType:
    """The dtype of new parameters: `dtype`, or float32.

    Raises BackendError for a dtype that is not floating, or that the library would silently narrow.
    """
    dtype = dtype_named(xp, "float32" if dtype is None else dtype)
    if not is_floating(dtype):
        raise BackendError(f"dtype is {dtype_name(dtype)}; parameters need a floating dtype such as 'float32'")
    if backend_name(xp) == "jax" and dtype_name(_jax_canonical(dtype)) != dtype_name(dtype):
        raise BackendError("jax keeps float64 switched off; run jax.config.update('jax_enable_x64', True) first")
    return dtype


def _jax_canonical(dtype: DType) -> DType:
    """The dtype jax really uses: 64-bit types become 32-bit ones unless x64 is switched on."""
    return importlib.import_module("jax").dtypes.canonicalize_dtype(dtype)


def device(array: Array) -> Device:
    """The device an array lives on, as its library names it."""
    try:
        return array.device
    except (AttributeError, RuntimeError):
        # jax arrays inside jax.jit have no device yet; None lets creation functions choose.
        return None


def from_host(xp: Namespace, data: Any, *, dtype: Any = None, device: Device = None) -> Array:
    """Move host data (a NumPy array, nested lists) into `xp`.

    Memory is shared where the library can. Raises DataError when nested lists are ragged, BackendError when the
    device does not exist.
    """
    numpy = importlib.import_module("numpy")
    try:
        host = numpy.asarray(data)
    except ValueError as error:
        raise DataError("rows differ in length; expected a rectangle, pad the shorter rows with pad_id") from error
    base = base_namespace(xp)
    if backend_name(base) == "numpy":
        if device not in (None, "cpu"):
            raise BackendError(f"numpy cannot place data on device {device!r}; it knows only 'cpu'")
        return host if dtype is None else host.astype(dtype_named(base, dtype), copy=False)
    dtype = dtype_named(base, host.dtype.name if dtype is None else dtype)
    if dtype_name(dtype) == "bfloat16" or host.dtype.name == "bfloat16":
        # Few libraries read ml_dtypes' bfloat16 from NumPy; float32 holds every bfloat16 exactly.
        host = host.astype("float32")
    elif not host.flags.writeable:
        host = host.copy()  # torch warns about memory that it could write and the owner forbids
    if backend_name(base) == "jax":
        dtype = _jax_canonical(dtype)
    try:
        return base.asarray(host, dtype=dtype, **({} if device is None else {"device": device}))
    except (AssertionError, RuntimeError, ValueError, TypeError) as error:  # torch without CUDA asserts
        if device is None:
            raise
        raise BackendError(f"{backend_name(base)} cannot place data on device {device!r}: {error}") from error


def to_host(array: Array) -> Any:
    """Return an array of any library as a NumPy array (bfloat16 as float32, exactly); memory may be shared."""
    numpy = importlib.import_module("numpy")
    name = backend_name(array_namespace(array))
    if name == "torch":
        array = array.detach().cpu()
        if dtype_name(array.dtype) == "bfloat16":
            array = array.float()
        return array.numpy()
    if name == "array_api_strict":
        # Its devices are simulated, and only arrays on its CPU can be read by NumPy.
        array = array.to_device(importlib.import_module(name).Device("CPU_DEVICE"))
    host = array.get() if name == "cupy" else numpy.asarray(array)
    return host.astype("float32") if host.dtype.name == "bfloat16" else host


def is_host_accessible(array: Array) -> bool:
    """Tell whether looking at values is cheap: no GPU to wait for, no tracer without values."""
    xp = array_namespace(array)
    if trace_level(xp):
        return False
    name = backend_name(xp)
    if name == "torch":
        return bool(array.device.type == "cpu")
    if name == "jax":
        jax = importlib.import_module("jax")
        # The device of an array that is spread over several is a sharding, which has no platform.
        return not isinstance(array, jax.core.Tracer) and getattr(array.device, "platform", "") == "cpu"
    return name in ("numpy", "array_api_strict")


def same_device(arrays: Sequence[Array | None]) -> None:
    """Raise BackendError when arrays live on different devices; None has no say."""
    found = [device(array) for array in arrays if array is not None]
    if all(place == found[0] for place in found):
        return
    places = {str(place): place for place in found if place is not None}
    if len(places) > 1:
        raise BackendError(
            f"arrays on different devices were mixed: {', '.join(places)}; move one over with model.to(device=...)"
        )
