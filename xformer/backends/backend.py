"""`Backend`: the facts about one array library that the Array API standard leaves open."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from xformer.backends import portable
from xformer.backends.array_types import Array, Device, DType, Namespace, NativeArray
from xformer.backends.dtypes import dtype_name
from xformer.backends.namespaces import BACKENDS, array_namespace, backend_name
from xformer.errors import BackendError

Table = tuple[Callable[..., Any], tuple[Any, ...]]  # a function that returns cached NumPy arrays, and its arguments
RANDOM_BITS = 16  # random bits per element of a dropout mask
KEPT_BYTES = 2**14  # size up to which copying an array costs no more than the call of an operation
_DLPACK_CPU = 1
_KEPT_TABLES = 32
# Raised for arrays without DLPack or a part of it, e.g. of bool.
_NO_DLPACK = (AttributeError, BufferError, NotImplementedError, RuntimeError, TypeError, ValueError)


class Backend:
    """Facts about one array library, with defaults for a library that follows the standard and offers nothing else.

    The modules of this package override them for NumPy, CuPy, torch, JAX and array_api_strict. Arrays and namespaces
    passed to the methods are those of the library itself, never traced ones.

    Attributes:
        name: Name of the library, e.g. "torch".
        is_writable: Whether xformer writes into arrays of the library, e.g. into the buffers of a KV cache.
        needs_upcast: Whether portable code computes float16 and bfloat16 in float32, since the library's promotion
            rules or functions do not handle them.
        builds_per_shape: Whether kernels are built for one shape of their arrays, which takes longer than running them,
            so that training pads batches to few different shapes.
    """

    is_writable = False
    needs_upcast = False
    builds_per_shape = False

    def __init__(self, name: str) -> None:
        self.name = name
        self._tables: dict[Any, Array] = {}

    # --- dtypes -------------------------------------------------------------------------------------------------------

    def dtype(self, xp: Namespace, name: str) -> DType:
        """Return the dtype called `name`; raise BackendError if the library has none."""
        if not hasattr(xp, name):
            raise BackendError(f"{self.name} has no dtype {name!r}; expected e.g. 'float32' or 'float64'")
        return getattr(xp, name)

    def canonical_dtype(self, dtype: DType) -> DType:
        """Return the dtype that arrays get if `dtype` is requested."""
        return dtype

    # --- host and devices ---------------------------------------------------------------------------------------------

    def from_host(self, xp: Namespace, data: Any, dtype: DType | None, device: Device) -> Array:
        """Return an array with the data of a NumPy array, sharing memory if the library can."""
        dtype = self.canonical_dtype(self.dtype(xp, data.dtype.name) if dtype is None else dtype)
        if "bfloat16" in (dtype_name(dtype), data.dtype.name):
            data = data.astype("float32")  # few libraries read bfloat16 of ml_dtypes; float32 holds every value
        elif not data.flags.writeable:
            data = data.copy()  # torch warns about read-only memory
        options = {} if device is None else {"device": device}
        try:
            return xp.asarray(data, dtype=dtype, **options)
        except TypeError:  # the standard promises that from_dlpack takes NumPy arrays, not that asarray does
            return xp.astype(xp.from_dlpack(data, **options), dtype)

    def rows_of_table(self, xp: Namespace, table: Table, rows: slice, dtype: DType, device: Device) -> Array:
        """Return rows of a NumPy array as an array that is not written to.

        The last tables are kept on the device, so that steps do not copy them again.
        """
        key = table, None if dtype is None else dtype_name(dtype), str(device)
        array = self._tables.get(key)
        if array is None:
            array = self.from_host(xp, compute(table), dtype, device)
            self._tables = dict([*self._tables.items(), (key, array)][-_KEPT_TABLES:])  # others may read the old dict
        return array if rows == slice(None) else array[rows, ...]

    def to_host(self, array: Array) -> Any:
        """Return the array as a NumPy array, sharing memory if the library can.

        NumPy asks by DLPack for a copy on the CPU, which libraries offer that refuse an implicit conversion.
        """
        if dtype_name(array.dtype) == "bfloat16":
            xp = array_namespace(array)
            array = xp.astype(array, xp.float32)
        try:
            return np.from_dlpack(array, device="cpu")  # type: ignore[arg-type]
        except _NO_DLPACK:
            host = np.asarray(array)
        if host.dtype == object:
            raise BackendError(f"{self.name} has neither __dlpack__ nor __array__, so its values cannot be read")
        return host

    def is_host_accessible(self, array: NativeArray) -> bool:
        """Return whether reading values is cheap: no GPU to wait for and no abstract value."""
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
        return portable.erf(x)

    def scatter_add(self, target: Array, indices: Array, updates: Array) -> Array:
        """Return `target` (rows, ...) with `updates` (n, ...) added to the rows `indices` (n,); repeats accumulate."""
        return portable.scatter_add(target, indices, updates)

    def top_k(self, x: Array, k: int) -> tuple[Array, Array]:
        """Return the k largest values and their indices, sorted; of equal values the lower index comes first."""
        return portable.top_k(x, k)

    def set_item(self, xp: Namespace, x: Array, value: Any, key: Any) -> Array:
        """Return a copy of `x` with `value` at `key`."""
        copy = xp.asarray(x, copy=True)
        copy[key] = value
        return copy

    # --- memory that others may write ---------------------------------------------------------------------------------

    def keep(self, array: Array) -> tuple[Array, Callable[[], bool] | None]:
        """Return an array with the values of this one that later writes to it do not change.

        Returns:
            The array, here a copy, and None; or the array itself and a function that ends the keeping and returns
            whether it was not written meanwhile.
        """
        return array_namespace(array).asarray(array, copy=True), None

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

    def bernoulli(self, xp: Namespace, key: int, threshold: int, shape: tuple[int, ...], device: Device) -> Array:
        """Draw booleans: True where 16 random bits, as an integer, are below `threshold`."""
        return self.from_host(xp, random_bits(key, shape) < threshold, xp.bool, device)

    def counted_bernoulli(
        self, xp: Namespace, key: int, counter: Array, threshold: int, shape: tuple[int, ...], device: Device
    ) -> Array:
        """Draw as `bernoulli` does with the key `key ^ counter`, where `counter` is an int64 scalar array."""
        return self.bernoulli(xp, key ^ int(counter), threshold, shape, device)

    @property
    def reads_counters_on_device(self) -> bool:
        """Return whether `counted_bernoulli` reads the counter on the device; otherwise counters stay on the host."""
        return type(self).counted_bernoulli is not Backend.counted_bernoulli

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


_BACKENDS: dict[str, Backend] = {}
_ON_LOAD: list[Callable[[Backend], None]] = []


def register_backend(backend: Backend) -> None:
    """Register the facts about a library, replacing the defaults."""
    _BACKENDS[backend.name] = backend
    for callback in _ON_LOAD:
        callback(backend)


def on_load(callback: Callable[[Backend], None]) -> None:
    """Call a function with each backend: now with those that are loaded, and later with each that is loaded."""
    _ON_LOAD.append(callback)
    for backend in _BACKENDS.values():
        callback(backend)


def loaded_backends() -> list[Backend]:
    """Return the backends that are loaded."""
    return list(_BACKENDS.values())


def backend_of(xp: Namespace) -> Backend:
    """Return the facts about the library behind a namespace; a library that xformer does not know has the defaults."""
    name = backend_name(xp)
    backend = _BACKENDS.get(name)
    if backend is None:
        if name in BACKENDS:
            importlib.import_module(f"xformer.backends.{name}")
        else:
            register_backend(Backend(name))
        backend = _BACKENDS[name]
    return backend
