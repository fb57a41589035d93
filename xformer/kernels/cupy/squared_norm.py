"""The sum of squares on CuPy, of many arrays per launch."""

from __future__ import annotations

from typing import Any

from xformer.kernels.cupy import cublas
from xformer.kernels.cupy import launch as cuda_launch
from xformer.kernels.cupy.arrays import compute_dtype, contiguous, dtype_names, empty, why_not
from xformer.kernels.cupy.grid import grid_for_elements
from xformer.kernels.cupy.tables import ARRAYS, BLOCK_ELEMENTS, MAX_ARRAYS, THREADS, batches, table_of
from xformer.ops.operation import Kernel


def _why_not(*arrays: Any, **options: Any) -> str | None:
    if len({compute_dtype(array) for array in arrays}) > 1:
        return "mixed dtypes: float64 and others"
    return next((reason for reason in map(why_not, arrays) if reason), None)


def _forward(*arrays: Any, save: bool) -> tuple[Any, Any]:
    """Sum the squares per block, then sum these in the order of the arrays."""
    arrays = tuple(contiguous(array) for array in arrays)
    num_blocks = sum(-(-array.size // BLOCK_ELEMENTS) for array in arrays)
    sums, norm = (empty(arrays[0], shape, compute_dtype(arrays[0])) for shape in ((num_blocks,), ()))
    start = 0
    for dtypes, batch in batches([(array,) for array in arrays], MAX_ARRAYS):
        addresses = [cublas.pointer(array) for (array,) in batch]
        table, blocks = table_of(ARRAYS, {"addresses": addresses}, sizes=tuple(array.size for (array,) in batch))
        cuda_launch.launch("optimizer.squares", dtypes, blocks, THREADS, table, sums[start:], BLOCK_ELEMENTS)
        start += blocks
    cuda_launch.launch("optimizer.total", dtype_names(sums), 1, 1024, sums, norm, num_blocks)
    return norm, arrays


def _vjp(g: Any, arrays: Any, needs: Any) -> tuple[Any, ...]:
    return tuple(_times_2g(array, g) if needed else None for array, needed in zip(arrays, needs, strict=True))


def _times_2g(x: Any, g: Any) -> Any:
    """Return 2 g x, without reading g on the host."""
    y, g = empty(x), contiguous(g, compute_dtype(x))
    cuda_launch.launch("elementwise.multiply_by_2g", dtype_names(x), *grid_for_elements(x), x, g, y, x.size)
    return y


KERNELS = [Kernel("cupy.squared_norm", "squared_norm", "cupy", _forward, _vjp, why_not=_why_not)]
