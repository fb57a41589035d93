"""Casts on CuPy, of many arrays per launch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from xformer.backends import array_namespace, dtype_name, dtype_named
from xformer.kernels.cupy import cublas
from xformer.kernels.cupy import launch as cuda_launch
from xformer.kernels.cupy.arrays import FLOATS, contiguous, empty, why_not
from xformer.kernels.cupy.tables import BLOCK_ELEMENTS, MAX_PAIRS, PAIRS, THREADS, batches, table_of
from xformer.ops.operation import Kernel


def _why_not(x: Any, *arrays: Any, dtype: str, **options: Any) -> str | None:
    if dtype_name(x.dtype) == "float64" and dtype not in ("float64", "float32"):
        return "float64 would be rounded to 16 bits twice"
    return why_not(x)


def _cast(arrays: Sequence[Any], dtype: Any) -> tuple[Any, ...]:
    pairs = [(x := contiguous(array), empty(x, dtype=dtype)) for array in arrays]
    for dtypes, batch in batches(pairs, MAX_PAIRS):
        inputs, outputs = zip(*batch, strict=True)
        columns = {"from": [*map(cublas.pointer, inputs)], "to": [*map(cublas.pointer, outputs)]}
        table, blocks = table_of(PAIRS, columns, sizes=tuple(x.size for x in inputs))
        cuda_launch.launch("optimizer.cast", dtypes, blocks, THREADS, table, BLOCK_ELEMENTS)
    return tuple(y for _, y in pairs)


def _forward(*arrays: Any, dtype: str, save: bool) -> tuple[Any, Any]:
    return _cast(arrays, dtype_named(array_namespace(*arrays), dtype)), arrays[0].dtype


def _vjp(g: Any, input_dtype: Any, needs: Any, *, dtype: str) -> tuple[Any, ...]:
    cotangents = iter(_cast([cotangent for cotangent in g if cotangent is not None], input_dtype))
    return tuple(None if cotangent is None else next(cotangents) for cotangent in g)


KERNELS = [Kernel("cupy.cast", "cast", "cupy", _forward, _vjp, dtypes=FLOATS, why_not=_why_not)]
