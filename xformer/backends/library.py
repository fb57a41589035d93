"""`Library`: an array library as a namespace that also answers what the Array API standard leaves open."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any, ClassVar
from weakref import WeakSet

import numpy as np

from xformer.backends import portable
from xformer.backends.array_types import Array, Device, DType, Namespace, NativeArray
from xformer.backends.dtypes import dtype_name, is_floating
from xformer.errors import BackendError, DataError

Table = tuple[Callable[..., Any], tuple[Any, ...]]  # a function that returns cached NumPy arrays, and its arguments
RANDOM_BITS = 16  # random bits per element of a dropout mask
KEPT_BYTES = 2**14  # size up to which copying an array costs no more than the call of an operation
_DLPACK_CPU = 1
_KEPT_TABLES = 32
# Raised for arrays without DLPack or a part of it, e.g. of bool.
_NO_DLPACK = (AttributeError, BufferError, NotImplementedError, RuntimeError, TypeError, ValueError)

CLASSES: dict[str, type[Library]] = {}  # subclasses, by the name of their library
LIBRARIES: WeakSet[Library] = WeakSet()  # all that are loaded


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
        builds_per_shape: Whether kernels are built for one shape of their arrays, which takes longer than running them,
            so that training pads batches to few different shapes.
        index_dtype: Dtype of indices: int64, or int32 on jax without x64.
        kernels: The kernels that may run, by the name of their operation.
    """

    library: Namespace
    index_dtype: DType
    trace_level: ClassVar[int] = 0
    is_trace: ClassVar[bool] = False
    is_writable: ClassVar[bool] = False
    needs_upcast: ClassVar[bool] = False
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

    # --- operations ---------------------------------------------------------------------------------------------------

    def apply(self, operation: Any, arrays: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Compute an operation of `xformer.ops` by the first kernel that can run the call, else by its definition."""
        for array in arrays:
            if isinstance(array, np.generic):
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
            return self.place(host, dtype, device)
        except Exception as error:  # each library raises its own exceptions; torch without CUDA asserts
            if device is None or isinstance(error, BackendError):
                raise
            raise BackendError(f"{self.name} cannot place data on device {device!r}: {error}") from error

    def place(self, data: Any, dtype: DType | None, device: Device) -> Array:
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
            array = self.place(compute(table), dtype, device)
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
        except _NO_DLPACK:
            host = np.asarray(array)
        if host.dtype == object:
            raise BackendError(f"{self.name} has neither __dlpack__ nor __array__, so its values cannot be read")
        return host

    def is_host_accessible(self, array: NativeArray) -> bool:
        """Return whether reading values is cheap: no GPU to wait for, and neither traced nor abstract."""
        try:
            return bool(array.__dlpack_device__()[0] == _DLPACK_CPU)
        except _NO_DLPACK:
            return False

    def is_abstract(self, array: NativeArray) -> bool:
        """Return whether an array has no values, since the library traces a function."""
        return False

    # --- functions that the standard lacks ----------------------------------------------------------------------------

    def erf(self, x: Array) -> Array:
        """Compute the error function elementwise."""
        return portable.erf(self, x)

    def scatter_add(self, target: Array, indices: Array, updates: Array) -> Array:
        """Return `target` (rows, ...) with `updates` (n, ...) added to the rows `indices` (n,); repeats accumulate."""
        return portable.scatter_add(self, target, indices, updates)

    def top_k(self, x: Array, k: int) -> tuple[Array, Array]:
        """Return the k largest values and their indices, sorted; of equal values the lower index comes first."""
        return portable.top_k(self, x, k)

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
        except _NO_DLPACK:
            return False

    # --- random numbers -----------------------------------------------------------------------------------------------

    def random_mask(self, key: int, threshold: int, shape: tuple[int, ...], device: Device) -> Array:
        """Draw booleans: True where 16 random bits, as an integer, are below `threshold`."""
        return self.place(random_bits(key, shape) < threshold, self.bool, device)

    def counted_random_mask(
        self, key: int, counter: Array, threshold: int, shape: tuple[int, ...], device: Device
    ) -> Array:
        """Draw as `random_mask` does with the key `key ^ counter`, where `counter` is an int64 scalar array."""
        return self.random_mask(key ^ int(counter), threshold, shape, device)

    @property
    def reads_counters_on_device(self) -> bool:
        """Return whether masks are drawn with counters on the device; otherwise counters stay on the host."""
        return type(self).counted_random_mask is not Library.counted_random_mask

    # --- execution ----------------------------------------------------------------------------------------------------

    def kernel_identity(self) -> str | None:
        """Return the versions on which the results of kernels depend if kernels are compared at their first use."""
        return None

    def graph_capture(self) -> Callable[[Callable[[], Any]], Callable[[], Any]] | None:
        """Return a function that captures the kernels of a function as a graph, or None.

        It returns a function that launches the graph.

        The captured function must read and write the same arrays in each call, and nothing on the host.
        """
        return None

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
    """Return scalars of NumPy, which its functions return in place of arrays without axes, as such arrays."""
    return tuple([np.asarray(x) if isinstance(x, np.generic) else x for x in values])


def compute(table: Table) -> Any:
    """Return a table as a NumPy array, which must not be changed."""
    function, arguments = table
    return function(*arguments)


def random_bits(key: int, shape: tuple[int, ...]) -> Any:
    """Draw 16 random bits for each element on the host, as a uint16 array."""
    count = math.prod(shape)
    # Dropout draws millions of these per step: SFC64 is twice as fast as PCG64. integers() over the full range returns
    # raw 64-bit words, four elements each, and releases the GIL, which random_raw() does not.
    generator = np.random.Generator(np.random.SFC64(np.random.SeedSequence(key)))
    words = generator.integers(0, 2**64 - 1, -(-count // 4), dtype=np.uint64, endpoint=True)
    return words.view(np.uint16)[:count].reshape(shape)
