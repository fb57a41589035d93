"""`Library`: an array library as a namespace that also answers what the Array API standard leaves open.

`resolve` finds it by a name or a module, and `array_namespace` by arrays.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import math
import pkgutil
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from types import ModuleType
from typing import Any, ClassVar
from weakref import WeakSet, WeakValueDictionary

import array_api_compat
import numpy as np

from xformer.backends import portable
from xformer.backends.array_types import Array, ArrayNamespace, Device, DType, Namespace, NativeArray, Shape
from xformer.backends.dtypes import dtype_name, is_floating
from xformer.environment import on_clear
from xformer.errors import BackendError, DataError, how_to_install, nearest_hint

Table = tuple[Callable[..., Any], tuple[Any, ...]]  # a function that returns cached NumPy arrays, and its arguments
RANDOM_BITS = 16  # random bits per element of a dropout mask
KEPT_BYTES = 2**14  # size up to which copying an array costs no more than the call of an operation
_DLPACK_CPU = 1
_KEPT_TABLES = 32
# Raised for arrays without DLPack or a part of it, e.g. of bool.
NO_DLPACK = (AttributeError, BufferError, NotImplementedError, RuntimeError, TypeError, ValueError)

CLASSES: dict[str, type[Library]] = {}  # subclasses, by the name of their library
LIBRARIES: WeakSet[Library] = WeakSet()  # all that are loaded


NOT_PLAIN = np.generic, np.memmap


class Library(ModuleType):
    """The namespace of an array library: functions of the standard, and answers to questions about its arrays.

    `array_namespace(x)` returns it. The functions of the library are attributes, as of a module; methods of this class
    come first. Its defaults suit every library that follows the standard. The modules of this package override them by
    subclasses, for example for torch: `class TorchLibrary(Library, library="torch")`. Arrays passed to the methods
    are those of the library itself, never traced ones.

    Args:
        name: Name of the library, e.g. "torch".
        module: Module with the functions of the standard, or another object that has them as attributes.
        functions: Functions that the module lacks.

    Attributes:
        name: Name of the library.
        library: The library itself; of a trace, the library under all traces.
        trace_level: Number of nested differentiations: 0, and more for traces of derivatives.
        is_trace: Whether the functions of a namespace record what they compute, for a derivative or for `jit`.
        is_writable: Whether xformer may write into arrays, e.g. into the buffers of a KV cache: the library allows it,
            and no derivative needs the old values.
        needs_upcast: Whether portable code computes float16 and bfloat16 in float32, since the library's promotion
            rules or functions do not handle them.
        has_windows: Whether its kernels for attention take a window without a mask of queries and keys.
        builds_per_shape: Whether kernels are built for one shape of their arrays, which takes longer than running them,
            so that training pads batches to few different shapes.
        index_dtype: Dtype of indices: int64, or int32 on jax without x64.
        kernels: The kernels that may run, by the name of their operation.
    """

    library: Namespace
    index_dtype: DType
    _given: Any  # what `complete` made the library of
    trace_level: ClassVar[int] = 0
    is_trace: ClassVar[bool] = False
    is_writable: ClassVar[bool] = False
    needs_upcast: ClassVar[bool] = False
    has_windows: ClassVar[bool] = False
    builds_per_shape: ClassVar[bool] = False

    def __init_subclass__(cls, *, library: str, **options: Any) -> None:
        super().__init_subclass__(**options)
        CLASSES[library] = cls

    def __init__(self, name: str, module: Any, functions: dict[str, Any] | None = None) -> None:
        super().__init__(module.__name__)
        names = getattr(module, "__dict__", {}).items()
        self.__dict__.update({each: value for each, value in names if not each.startswith("__")}, **(functions or {}))
        for cls in type(self).__mro__[: -len(ModuleType.__mro__)]:
            for each in vars(cls):
                self.__dict__.pop(each, None)
        self.module, self.name, self.library = module, name, self
        self.kernels: dict[str, Any] = {}
        self._tables: dict[Any, Array] = {}
        self.__dict__["index_dtype"] = self.int64  # JAX has a property
        LIBRARIES.add(self)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *dir(self.module)})

    def __repr__(self) -> str:
        return repr(self.module)

    def __reduce__(self) -> Any:
        """Pickle the library by its name, or by its module."""
        is_known = _LIBRARIES.get(self.name) is self
        return (resolve, (self.name,)) if is_known else (complete, (self.module,))

    # --- operations ---------------------------------------------------------------------------------------------------

    def apply(self, operation: Any, arrays: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Compute an operation of `xformer.ops` by the first kernel that can run the call, else by its definition."""
        for array in arrays:
            if isinstance(array, NOT_PLAIN):
                arrays = as_arrays(arrays)
                break
        dtype = operation.signature.check(operation.name, arrays)
        kernel = operation.select(self, arrays, options, dtype, save=False)
        return kernel.forward(*arrays, save=False, **options)[0]

    def check_range(self, array: Array, size: int, check: Callable[[Array], None]) -> None:
        """Let `check(array)` raise an error unless all values are in [0, size), where reading them is cheap.

        A function traced by jit is checked in each run.
        """
        if self.is_host_accessible(array):
            check(array)

    def call_on_host(self, function: Callable[..., Any], *arrays: Any) -> Any:
        """Call a function that reads values of plain arrays on the host, and returns arrays or None.

        While `jit` traces a function, each later run calls it again.
        """
        return function(*arrays)

    # --- dtypes -------------------------------------------------------------------------------------------------------

    def dtype_named(self, name: str | DType) -> DType:
        """Return the dtype with a name, or with the name of a dtype of any library.

        Raises:
            BackendError: If the library has no such dtype; bfloat16 on NumPy and CuPy requires ml_dtypes.
        """
        name = name if isinstance(name, str) else dtype_name(name)
        if not hasattr(self, name):
            raise BackendError(f"{self.name} has no dtype {name!r}; expected e.g. 'float32' or 'float64'")
        return getattr(self, name)

    def canonical_dtype(self, dtype: DType) -> DType:
        """Return the dtype that arrays get if `dtype` is requested."""
        return dtype

    def default_float(self, dtype: str | DType | None = None) -> DType:
        """Return the dtype of new parameters: `dtype`, or float32.

        Raises:
            BackendError: If the dtype is not floating-point, or if the library would silently replace it.
        """
        dtype = self.dtype_named("float32" if dtype is None else dtype)
        if not is_floating(dtype):
            raise BackendError(f"dtype is {dtype_name(dtype)}; parameters need a floating dtype such as 'float32'")
        if dtype_name(self.canonical_dtype(dtype)) != dtype_name(dtype):
            raise BackendError("jax disables float64 by default; call jax.config.update('jax_enable_x64', True) first")
        return dtype

    # --- host and devices ---------------------------------------------------------------------------------------------

    def from_host(self, data: Any, *, dtype: DType | str | None = None, device: Device = None) -> Array:
        """Move host data into the library; memory is shared if the library can.

        Args:
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
        if dtype is not None:
            dtype = self.dtype_named(dtype)
        try:
            return self._place(host, dtype, device)
        except Exception as error:  # each library raises its own exceptions; torch without CUDA asserts
            if device is None or isinstance(error, BackendError):
                raise
            raise BackendError(f"{self.name} cannot place data on device {device!r}: {error}") from error

    def _place(self, data: Any, dtype: DType | None, device: Device) -> Array:
        """Return an array with the data of a NumPy array, sharing memory if the library can."""
        dtype = self.canonical_dtype(self.dtype_named(data.dtype.name) if dtype is None else dtype)
        if "bfloat16" in (dtype_name(dtype), data.dtype.name):
            data = data.astype("float32")  # few libraries read bfloat16 of ml_dtypes; float32 holds every value
        elif not data.flags.writeable:
            data = data.copy()  # torch warns about read-only memory
        options = {} if device is None else {"device": device}
        try:
            return self.asarray(data, dtype=dtype, **options)
        except TypeError:  # the standard promises that from_dlpack takes NumPy arrays, not that asarray does
            return self.astype(self.from_dlpack(data, **options), dtype)

    def rows_of_table(self, table: Table, rows: slice, dtype: DType, device: Device) -> Array:
        """Return rows of a NumPy array as an array that is not written to.

        The last tables are kept on the device, so that steps do not copy them again.
        """
        key = table, None if dtype is None else dtype_name(dtype), str(device)
        array = self._tables.get(key)
        if array is None:
            array = self._place(compute(table), dtype, device)
            self._tables = dict([*self._tables.items(), (key, array)][-_KEPT_TABLES:])  # others may read the old dict
        return array if rows == slice(None) else array[rows, ...]

    def to_host(self, array: Array) -> Any:
        """Return the array as a NumPy array, sharing memory if the library can; bfloat16 becomes float32.

        NumPy asks by DLPack for a copy on the CPU, which libraries offer that refuse an implicit conversion.
        """
        if dtype_name(array.dtype) == "bfloat16":
            array = self.astype(array, self.float32)
        try:
            return np.from_dlpack(array, device="cpu")  # type: ignore[arg-type]
        except NO_DLPACK:
            host = np.asarray(array)
        if host.dtype == object:
            raise BackendError(f"{self.name} has neither __dlpack__ nor __array__, so its values cannot be read")
        return host

    def copy_from_gpu(self, array: Any) -> Array | None:
        """Return a copy of an array of another library that is in the memory of a GPU, or None to copy by the host."""
        return None

    def is_host_accessible(self, array: NativeArray) -> bool:
        """Return whether reading values is cheap: no GPU to wait for, and neither traced nor abstract."""
        try:
            return bool(array.__dlpack_device__()[0] == _DLPACK_CPU)
        except NO_DLPACK:
            return False

    def is_abstract(self, array: NativeArray) -> bool:
        """Return whether an array has no values, since the library traces a function."""
        return False

    # --- functions that the standard lacks ----------------------------------------------------------------------------

    erf, scatter_add, top_k = portable.erf, portable.scatter_add, portable.top_k

    def set_item(self, x: Array, value: Any, key: Any) -> Array:
        """Return a copy of `x` with `value` at `key`."""
        copy = self.asarray(x, copy=True)
        copy[key] = value
        return copy

    # --- memory that others may write ---------------------------------------------------------------------------------

    def keep(self, array: Array) -> tuple[Array, Callable[[], bool] | None]:
        """Return an array with the values of this one that later writes to it do not change.

        Returns:
            The array, here a copy, and None; or the array itself and a function that ends the keeping and returns
            whether it was not written meanwhile.
        """
        return self.asarray(array, copy=True), None

    def joins_maps(self) -> bool:
        """Return whether two linear maps of one input are faster as one operation."""
        return False

    def persist(self, array: Array, tree: Any, flatten: Callable[[Any], Any]) -> Any:
        """Return a tree of arrays like `array`; those of Dask are computed, which else happens at each use."""
        if not hasattr(array, "__dask_graph__"):
            return tree
        leaves, rebuild = flatten(tree)
        return rebuild(importlib.import_module("dask").persist(*leaves))

    def share_memory(self, x: Array, y: Array) -> bool:
        """Return whether a write into `x` changes `y`; one of them was made from the other.

        NumPy compares the memory by DLPack; arrays that it cannot read are taken for copies.
        """
        if x is y:
            return True
        memory = [getattr(array, "__sycl_usm_array_interface__", {}).get("data") for array in (x, y)]
        if all(memory):
            return bool(memory[0] == memory[1])
        try:
            return bool(np.may_share_memory(np.from_dlpack(x), np.from_dlpack(y)))  # type: ignore[arg-type]
        except NO_DLPACK:
            return False

    # --- random numbers -----------------------------------------------------------------------------------------------

    def random_mask(self, key: int, threshold: int, shape: Shape, device: Device) -> Array:
        """Draw booleans: True where 16 random bits, as an integer, are below `threshold`."""
        return self._place(random_bits(key, shape) < threshold, self.bool, device)

    def counted_random_mask(self, key: int, counter: Array, threshold: int, shape: Shape, device: Device) -> Array:
        """Draw as `random_mask` does with the key `key ^ counter`, where `counter` is an int64 scalar array."""
        return self.random_mask(key ^ int(counter), threshold, shape, device)

    @property
    def reads_counters_on_device(self) -> bool:
        """Return whether masks are drawn with counters on the device; otherwise counters stay on the host."""
        return type(self).counted_random_mask is not Library.counted_random_mask

    # --- execution ----------------------------------------------------------------------------------------------------

    # other_device(arrays): the device of the first array as a context if the library would compute on another one, or
    # None. Most libraries compute where the arrays are.
    other_device: Any = None

    def kernel_identity(self) -> str | None:
        """Return the versions on which the results of kernels depend if kernels are compared at their first use."""
        return None

    def graph_capture(self) -> Callable[[Callable[..., Any]], Callable[[], Any]] | None:
        """Return a function that captures the kernels of a function as a graph, or None.

        It returns a function that launches the graph.

        The captured function must read and write the same arrays in each call, and nothing on the host. It gets a
        function that copies an array, for those it makes: the next graph overwrites others.
        """
        return None

    def program_bytes(self, default: int) -> int:
        """Return how much memory programs that are kept for later calls may take; `default` on a CPU."""
        return default

    def configure(self, *, dtype: str | None, num_threads: int) -> None:
        """Prepare the process for a command that computes in `dtype` on `num_threads` threads."""

    def register_pytree(self, cls: type, flatten: Callable[..., Any], unflatten: Callable[..., Any]) -> None:
        """Make a class a pytree of the library, if the library has pytrees.

        Args:
            cls: The class.
            flatten: Returns the children of an object and its static part, which has their `names`.
            unflatten: Builds an object from the static part and the children.
        """


def as_arrays(values: Iterable[Any]) -> tuple[Any, ...]:
    """Turn memory maps and scalars of NumPy, which its functions return for arrays without axes, into arrays."""
    return tuple([np.asarray(x) if isinstance(x, NOT_PLAIN) else x for x in values])


def compute(table: Table) -> Any:
    """Return a table as a NumPy array, which must not be changed."""
    function, arguments = table
    return function(*arguments)


def random_bits(key: int, shape: Shape) -> Any:
    """Draw 16 random bits for each element on the host, as a uint16 array."""
    count = math.prod(shape)
    # Dropout draws millions of these per step: SFC64 is twice as fast as PCG64. integers() over the full range returns
    # raw 64-bit words, four elements each, and releases the GIL, which random_raw() does not.
    generator = np.random.Generator(np.random.SFC64(np.random.SeedSequence(key)))
    words = generator.integers(0, 2**64 - 1, -(-count // 4), dtype=np.uint64, endpoint=True)
    return words.view(np.uint16)[:count].reshape(shape)


# --- libraries with small adaptations ---------------------------------------------------------------------------------


class StrictLibrary(Library, library="array_api_strict"):
    """Adapt xformer to array_api_strict, the reference implementation of the standard."""

    def to_host(self, array: NativeArray) -> Any:
        """Move the array to the CPU first: the devices are simulated, and NumPy reads only the CPU's arrays."""
        return np.asarray(array.to_device(self.module.Device("CPU_DEVICE")))

    def share_memory(self, x: NativeArray, y: NativeArray) -> bool:
        """Compare the arrays of NumPy inside; there is no DLPack of the simulated devices."""
        return bool(np.may_share_memory(x._array, y._array))


class MlxLibrary(Library, library="mlx"):
    """Adapt xformer to MLX, the array library of Apple, which also runs on the CPUs of Linux and on CUDA."""

    def erf(self, x: NativeArray) -> NativeArray:
        """Compute erf by MLX."""
        return self.module.erf(x)

    def scatter_add(self, target: NativeArray, indices: NativeArray, updates: NativeArray) -> NativeArray:
        """Add by `at[].add`."""
        return target.at[indices].add(updates)

    def share_memory(self, x: NativeArray, y: NativeArray) -> bool:
        """Compare the objects: a write into an array changes no slice of it."""
        return x is y


class NdonnxLibrary(Library, library="ndonnx"):
    """Adapt xformer to ndonnx, whose arrays are computed by ONNX."""

    def to_host(self, array: NativeArray) -> Any:
        """Compute the array, which cannot be exported otherwise."""
        return array.unwrap_numpy()


# --- finding a library ------------------------------------------------------------------------------------------------

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
_DYNAMIC: Any = object()
NAMESPACE_OF_TYPE: dict[type, Namespace] = {}

_LIBRARIES: dict[str, Library] = {}  # known ones that are ready, by name
_LOADING: dict[str, Library] = {}
_LOCK = threading.RLock()
_COMPLETED: WeakValueDictionary[int, Library] = WeakValueDictionary()  # by the id of `_given`
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
    name = getattr(xp, "__name__", "").removeprefix("array_api_compat.")
    root = name.split(".")[0]
    if name not in (root, f"{root}.numpy", f"{root}.core") and _is_known(root) and name != known_backends()[root]:
        raise BackendError(f"xp is the module {name}; expected {root}, which has the functions of the standard")
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
    arrays' class, and its value is the module with the standard's functions. That module may define a subclass of
    `Library`.
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
        with _LOCK:  # other threads get it once all callbacks have ended
            library = _LIBRARIES.get(name) or _LOADING.get(name)
            if library is None:
                module = _import(name)
                library = _LOADING[name] = CLASSES.get(name, Library)(name, module)
                try:
                    for callback in _ON_LOAD:
                        callback(library)
                    _LIBRARIES[name] = library
                finally:
                    del _LOADING[name]
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
            # array_api_compat imports them, which takes longer than NumPy itself.
            _defer("numpy.f2py", "numpy.testing", "numpy.ma", "numpy.polynomial", "numpy.random")
        module = importlib.import_module(_STANDARD_MODULES.get(name) or known_backends()[name])
        if name in _STANDARD_MODULES and name not in CLASSES:
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
        root = name.split(".")[0]
        if isinstance(error, ImportError) and root.isidentifier() and importlib.util.find_spec(root) is not None:
            raise BackendError(f"backend {name!r} is installed but cannot be imported: {error}") from error
        hint = nearest_hint(name, known_backends().keys())
        if not hint.startswith("did you mean"):
            hint = f"a device or a dtype is passed as device={name!r} or dtype=..."
        raise BackendError(
            f"backend {name!r} is unknown; expected one of {', '.join(known_backends())}, or the name of another "
            f"module that follows the Array API standard; {hint}"
        ) from error


def complete(xp: Any) -> Library:
    """Return a library that xformer does not know, with missing functions composed of others.

    Args:
        xp: A module, or an object with the functions of the standard. If it has no `__array_namespace_info__`,
            array-api-compat's counterpart is used where there is one, e.g. for `dask.array`.

    Raises:
        BackendError: If functions are missing that cannot be composed.
    """
    if (library := _COMPLETED.get(id(xp))) is not None:
        return library
    given = xp
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
    composed = {} if hasattr(xp, "take_along_axis") else {"take_along_axis": take_along_axis}
    root = xp.__name__.removeprefix("array_api_compat.").split(".")[0]
    name = _BACKEND_OF_ROOT.get(root, xp.__name__)
    library = _COMPLETED[id(given)] = CLASSES.get(name, Library)(name, xp, composed)
    library._given = given
    return library


def load_imported() -> None:
    """Load the libraries that the program has imported by now."""
    for name in BACKENDS:
        if name in sys.modules and name not in _LIBRARIES:
            with contextlib.suppress(BackendError):  # CuPy without a GPU
                _load(name)


def array_namespace(*arrays: Any) -> ArrayNamespace:
    """Return the common namespace of `arrays`; None and Python scalars are ignored.

    Arrays under differentiation carry their own namespace. Among several the innermost trace wins, since its operations
    accept plain arrays and arrays of outer traces as constants.

    Raises:
        BackendError: If arrays of two libraries are mixed, or if there is no array.
    """
    result: Any = None
    for array in arrays:
        namespace = NAMESPACE_OF_TYPE.get(type(array))
        if namespace is TRACED:
            namespace = array._namespace
        elif namespace is None:
            if array is None or isinstance(array, bool | int | float | complex):
                continue
            namespace = _namespace_of_new_type(array)
        if namespace is _DYNAMIC:
            namespace = complete(array.__array_namespace__())
        if result is None or result is namespace:
            result = namespace
        else:
            result = _innermost(result, namespace)
    if result is None and any(hasattr(array, "dtype") for array in arrays):
        result = _load("numpy")  # numpy.float64 is a Python float; used only if there is no other array
    if result is None:
        types = ", ".join(type(array).__name__ for array in arrays)
        raise BackendError(f"no array among the arguments ({types}); expected at least one array")
    return result


def _namespace_of_new_type(array: Any) -> Namespace:
    """Find the namespace for a type that was not seen before, and remember it."""
    cls, namespace = type(array), _DYNAMIC
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
        received = f"got a {cls.__module__}.{cls.__name__}"
        raise BackendError(f"{received}; expected an array of {', '.join(BACKENDS)}; use xp.asarray")
    if isinstance(array, np.ndarray) and cls not in (np.ndarray, np.memmap) and namespace.name == "numpy":
        received = f"an array is a {cls.__module__}.{cls.__name__}, whose functions may compute something else"
        expected = "expected a plain numpy.ndarray: pass np.asarray(x), or x.filled(value) for a masked array"
        raise BackendError(f"{received}; {expected}")
    NAMESPACE_OF_TYPE[cls] = namespace
    return namespace


def _innermost(first: Namespace, second: Namespace) -> Namespace:
    """Choose the inner one of two traces of a library, or the one that records; two libraries cannot be mixed."""
    names = first.library.name, second.library.name
    if names[0] != names[1]:
        problem = f"arrays of {names[0]} and {names[1]} were mixed"
        raise BackendError(f"{problem}; move one over, e.g. model.to(xp) or xp.asarray(...)")
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
