"""Adapt xformer to CuPy. Functions that need the module cupy itself import it: its namespace suffices here."""

from __future__ import annotations

import contextlib
import functools
import importlib
import math
from collections.abc import Callable, Iterable
from typing import Any

from xformer.backends.array_types import Device, DType, Shape
from xformer.backends.array_types import NativeArray as Array
from xformer.backends.dtypes import dtype_name
from xformer.backends.library import NO_DLPACK, Library, Table, array_namespace, compute
from xformer.backends.numpy import bfloat16
from xformer.backends.portable import compute_in_float32
from xformer.environment import env_value

_DLPACK_CUDA = 2
_TABLES: dict[Any, tuple[Any, Array]] = {}  # on the host, where they are never freed, and on a device
# Of the kernel for dropout masks: threads per block, elements per thread, most blocks.
_THREADS, _ELEMENTS_PER_THREAD, _MAX_BLOCKS = 256, 16, 2**13


@functools.cache
def _calls() -> Any:
    return importlib.import_module("xformer.kernels.cupy.calls")


@functools.cache
def _memory(device: int) -> int:
    """Return the size of the memory of the current device."""
    return int(importlib.import_module("cupy").cuda.runtime.memGetInfo()[1])


class CupyLibrary(Library, library="cupy"):
    """Adapt xformer to CuPy."""

    is_writable = True
    needs_upcast = True  # as NumPy
    has_windows = True
    builds_per_shape = True  # cuDNN's attention

    def joins_maps(self) -> bool:
        """Return whether the order of sums is free: two maps at once add to the cotangent of their input in another."""
        return not importlib.import_module("xformer.native").is_reproducible()

    @property
    def bfloat16(self) -> DType:
        """Return the dtype of ml_dtypes."""
        return bfloat16()

    def apply(self, operation: Any, arrays: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Compute an operation; a call like an earlier one enqueues the same kernels at once."""
        return _calls().apply(self, operation, arrays, options)

    def rows_of_table(self, table: Table, rows: slice, dtype: DType, device: Device) -> Array:
        """Keep the table on the device: a copy in each step takes time, and cannot be part of a CUDA graph."""
        cuda = importlib.import_module("cupy").cuda
        host = compute(table)
        key = id(host), dtype_name(dtype), cuda.runtime.getDevice() if device is None else device.id
        if key not in _TABLES:
            _TABLES[key] = host, self._place(host, dtype, device)
            cuda.get_current_stream().synchronize()  # other streams may use it from now on
        return _TABLES[key][1][rows, ...]

    def _place(self, data: Any, dtype: DType | None, device: Device) -> Array:
        """Copy bfloat16 as the bits of uint16."""
        if dtype_name(data.dtype) != "bfloat16":
            return super()._place(data, dtype, device)
        words: Any = super()._place(data.view("uint16"), None, device)
        array: Array = words.view(self.bfloat16)
        if dtype in (None, self.bfloat16):
            return array
        with device or contextlib.nullcontext():
            return self.astype(array, dtype)

    def copy_from_gpu(self, array: Any) -> Array | None:
        """Copy by DLPack; bfloat16 as the bits of int16, which every version reads."""
        try:
            if array.__dlpack_device__()[0] != _DLPACK_CUDA:
                return None
            array = array.detach() if hasattr(array, "detach") else array
            is_bfloat16 = dtype_name(array.dtype) == "bfloat16"
            array = array.view(array_namespace(array).int16) if is_bfloat16 else array
            shared = importlib.import_module("cupy").from_dlpack(array)
        except NO_DLPACK:
            return None
        with shared.device:
            return shared.view(self.bfloat16).copy() if is_bfloat16 else shared.copy()

    def to_host(self, array: Array) -> Any:
        """Copy the array from the GPU; bfloat16 becomes float32."""
        host = array.get()
        return host.astype("float32") if host.dtype.name == "bfloat16" else host

    def is_host_accessible(self, array: Array) -> bool:
        """Return False: reading waits for the GPU."""
        return False

    @compute_in_float32
    def erf(self, x: Array) -> Array:
        """Compute erf by CuPy's SciPy functions."""
        return importlib.import_module("cupyx.scipy.special").erf(x)

    @compute_in_float32
    def scatter_add(self, target: Array, indices: Array, updates: Array) -> Array:
        """Sort the updates by row and sum each row as a tree.

        CuPy's own function adds by atomics, in an order, and so with bits, that differ from call to call.
        """
        count, result = indices.shape[0], target.copy()
        if 0 in (count, *target.shape):
            return result
        order = self.argsort(indices, stable=True)
        rows = self.take(indices, order, axis=0)
        sums = self.take(self.reshape(updates, (count, math.prod(updates.shape[1:]))), order, axis=0)
        distance = 1
        while distance < count:  # each is by now the sum of the last `distance` updates of its row, itself included
            same_row = self.expand_dims(rows[distance:] == rows[:-distance], axis=1)
            later = sums[distance:]
            later += self.where(same_row, sums[:-distance], 0)
            distance *= 2
        # The last sum of each row is its total. Every update of a row writes that total, so all writes to a row agree.
        totals = self.take(sums, self.searchsorted(rows, rows, side="right") - 1, axis=0)
        result[rows] += self.reshape(totals, updates.shape)
        return result

    def share_memory(self, x: Array, y: Array) -> bool:
        """Compare the bounds of the memory."""
        return bool(importlib.import_module("cupy").may_share_memory(x, y))

    def random_mask(self, key: int, threshold: int, shape: Shape, device: Device) -> Array:
        """Draw by a kernel that writes only the mask.

        CuPy's generators keep a state for each thread of the GPU and draw integers that take four times the memory.
        """
        return self.counted_random_mask(key, None, threshold, shape, device)

    def counted_random_mask(self, key: int, counter: Any, threshold: int, shape: Shape, device: Device) -> Array:
        """Let the kernel read the counter, if any, so that a CUDA graph draws another mask in each launch."""
        with device or contextlib.nullcontext():
            if env_value("XFORMER_KERNELS") == "portable":
                key ^= 0 if counter is None else int(self.to_host(counter))
                return super().random_mask(key, threshold, shape, None)
            mask = self.empty(shape, dtype=self.bool)
            blocks = min(_MAX_BLOCKS, -(-mask.size // (_ELEMENTS_PER_THREAD * _THREADS)))
            words = (key >> 32 * index & 0xFFFFFFFF for index in range(4))
            launch = importlib.import_module("xformer.kernels.cupy.launch").launch
            launch("random.dropout_mask", ("bool",), blocks, _THREADS, mask, mask.size, threshold, *words, counter)
            return mask

    def other_device(self, arrays: Iterable[Any]) -> Any:
        """Compare with the current device of the thread, on which CuPy computes."""
        first = next((array for array in arrays if isinstance(array, self.ndarray)), None)
        is_current_device = importlib.import_module("xformer.kernels.cupy.launch").is_current_device
        return None if first is None or is_current_device(first) else first.device

    def kernel_identity(self) -> str:
        """Return the GPU, the versions of driver and libraries, and a hash of the sources of the kernels."""
        return importlib.import_module("xformer.kernels.cupy.launch").identity()

    def program_bytes(self, default: int) -> int:
        """Return a quarter of the memory of the GPU, where logits alone take gigabytes."""
        return max(default, _memory(importlib.import_module("cupy").cuda.runtime.getDevice()) // 4)

    def graph_capture(self) -> Callable[[Callable[..., Any]], Callable[[], Any]] | None:
        """Return the function that captures CUDA graphs, or None if kernels are switched off."""
        if env_value("XFORMER_KERNELS") == "portable":
            return None
        return importlib.import_module("xformer.kernels.cupy.graph").CapturedGraph
