"""Adapt xformer to torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree

from xformer.backends import portable
from xformer.backends.array_types import Device, DType, Shape
from xformer.backends.array_types import NativeArray as Array
from xformer.backends.dtypes import dtype_name
from xformer.backends.library import KEPT_BYTES, NAMESPACE_OF_TYPE, RANDOM_BITS, Library, Table, compute
from xformer.backends.portable import compute_in_float32


class TorchLibrary(Library, library="torch"):
    """Adapt xformer to torch."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        # torch.compile traces no imports, and compiles again when a dict that it has read has grown.
        NAMESPACE_OF_TYPE.update(dict.fromkeys((torch.Tensor, torch.nn.Parameter), self))

    def _place(self, data: Any, dtype: DType | None, device: Device) -> Array:
        """Inside torch.compile, which traces NumPy, do not ask for flags of the array."""
        if torch.compiler.is_compiling():
            return torch.asarray(data, dtype=dtype, device=device)
        return super()._place(data, dtype, device)

    def rows_of_table(self, table: Table, rows: slice, dtype: DType, device: Device) -> Array:
        """Inside torch.compile, let the whole table be a constant, so that the rows may be of any number."""
        if not torch.compiler.is_compiling():
            # Not kept, because it may belong to inference mode.
            return self._place(compute(table)[rows], dtype, device)
        return _constant_table(table, dtype, device)[rows]

    def to_host(self, array: Array) -> Any:
        """Return the array as a NumPy array; NumPy has no bfloat16."""
        array = array.detach().cpu()
        return (array.float() if array.dtype == torch.bfloat16 else array).numpy()

    def is_host_accessible(self, array: Array) -> bool:
        """Return whether the array has values, on the CPU; inside torch.compile, arrays have none."""
        return bool(array.device.type == "cpu") and not torch.compiler.is_compiling()

    def keep(self, array: Array) -> tuple[Array, Callable[[], bool] | None]:
        """Copy small arrays; compare the number of writes, which torch counts, of others."""
        if torch.compiler.is_compiling() or array.is_inference():
            return super().keep(array)
        if array.numel() * array.element_size() <= KEPT_BYTES:
            return array.clone(), None
        version = array._version
        return array, lambda: array._version == version

    def share_memory(self, x: Array, y: Array) -> bool:
        """Compare the storage."""
        return x.untyped_storage().data_ptr() == y.untyped_storage().data_ptr()

    def erf(self, x: Array) -> Array:
        """Compute erf by `torch.erf`."""
        return torch.erf(x)

    @compute_in_float32
    def scatter_add(self, target: Array, indices: Array, updates: Array) -> Array:
        """Add by `index_add`."""
        return target.index_add(0, indices, updates)

    def top_k(self, x: Array, k: int) -> tuple[Array, Array]:
        """Use `torch.topk`, which leaves the order of equal values open: ties, and arrays on a GPU, are sorted."""
        if k == x.shape[-1] or not self.is_host_accessible(x):
            values, indices = torch.sort(x, dim=-1, descending=True, stable=True)
            return values[..., :k], indices[..., :k]
        values, indices = torch.topk(x, k, dim=-1, sorted=True)
        if portable.is_tied(self, x, values, k) or bool((values[..., 1:] == values[..., :-1]).any()):
            return portable.top_k(self, x, k)
        return values, indices

    def random_mask(self, key: int, threshold: int, shape: Shape, device: Device) -> Array:
        """Draw on the device of the mask; on the CPU by NumPy, since torch's generator takes only 32 bits of a key."""
        target = torch.device(device or "cpu")
        if target.type == "cpu":
            return super().random_mask(key, threshold, shape, device)
        generator = torch.Generator(device=target).manual_seed(key % 2**63)
        bits = torch.randint(0, 2**RANDOM_BITS, shape, generator=generator, device=target, dtype=torch.int32)
        return bits < threshold

    def configure(self, *, dtype: str | None, num_threads: int) -> None:
        """Limit torch's threads."""
        torch.set_num_threads(min(num_threads, torch.get_num_threads()))

    def register_pytree(self, cls: type, flatten: Callable[..., Any], unflatten: Callable[..., Any]) -> None:
        """Make a class a pytree of `torch.utils._pytree`."""
        _pytree.register_pytree_node(
            cls, flatten, lambda children, static: unflatten(static, children), serialized_type_name=cls.__qualname__
        )


def _constant_table(table: Table, dtype: DType, device: Device) -> Array:
    with torch.inference_mode(False):  # a compiled training step may use it too
        return torch.asarray(compute(table), dtype=dtype, device=device, copy=True)


torch.compiler.assume_constant_result(_constant_table)
for _dtype in vars(torch).values():
    if isinstance(_dtype, torch.dtype):
        dtype_name(_dtype)
