"""Operations on all parameters of a model on CuPy, many arrays per launch: Adam, squared norm and casts."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from xformer.backends import array_namespace, dtype_name, dtype_named
from xformer.kernels.cupy import cublas
from xformer.kernels.cupy import launch as cuda_launch
from xformer.kernels.cupy.arrays import (
    compute_dtype,
    contiguous,
    dtype_names,
    empty,
    is_compatible_dtype,
    supports_floats,
    unsupported_reason,
)
from xformer.kernels.cupy.grid import grid_for_elements
from xformer.kernels.registry import Kernel, register
from xformer.ops.adam import Settings, Slot, slots, updated, writable
from xformer.tree import is_array

_BLOCK_ELEMENTS = 8192
_THREADS = 256
# Tables of cuda/optimizer.cu; with the other arguments they fit in the 4 KiB that every device accepts.
_MAX_SLOTS, _MAX_ARRAYS, _MAX_PAIRS = 64, 128, 112
_SLOTS = np.dtype(
    [(name, np.uint64, _MAX_SLOTS) for name in ("parameters", "gradients", "exp_avgs", "exp_avg_sqs")]
    + [("sizes", np.int64, _MAX_SLOTS), ("weight_decays", np.float64, _MAX_SLOTS), ("ends", np.int64, _MAX_SLOTS)]
)
_ARRAYS = np.dtype(
    [("addresses", np.uint64, _MAX_ARRAYS), ("sizes", np.int64, _MAX_ARRAYS), ("ends", np.int64, _MAX_ARRAYS)]
)
_PAIRS = np.dtype(
    [(name, np.uint64, _MAX_PAIRS) for name in ("from", "to")]
    + [(name, np.int64, _MAX_PAIRS) for name in ("sizes", "ends")]
)


def _batches(items: Sequence[Any], max_items: int) -> Iterator[tuple[tuple[str, ...], list[Any]]]:
    """Group nonempty items (array, ...) by the dtypes of their first two entries, in batches of at most `max_items`."""
    by_dtypes: dict[tuple[str, ...], list[Any]] = {}
    for item in items:
        if item[0].size:
            by_dtypes.setdefault(dtype_names(*item[:2]), []).append(item)
    for dtypes, group in by_dtypes.items():
        for start in range(0, len(group), max_items):
            yield dtypes, group[start : start + max_items]


def _table(dtype: Any, columns: dict[str, list[Any]], **constants: tuple[Any, ...]) -> tuple[Any, int]:
    """Return a table, which is passed by value, and the number of blocks; `constants` are the same in every step."""
    constant_table, blocks = _constant_table(dtype, **constants)
    table = constant_table.copy()
    _fill(table, columns)
    return table, blocks


@functools.lru_cache(maxsize=256)
def _constant_table(dtype: Any, sizes: tuple[int, ...], **constants: tuple[Any, ...]) -> tuple[Any, int]:
    table = np.zeros(1, dtype)
    ends = list(itertools.accumulate(-(-size // _BLOCK_ELEMENTS) for size in sizes))
    _fill(table, {**constants, "sizes": sizes, "ends": ends})
    return table, ends[-1]


def _fill(table: Any, columns: dict[str, Any]) -> None:
    for name, column in columns.items():
        table[name][0, : len(column)] = column


# --- adam ------------------------------------------------------------------------------------------------------------


def _supports(arrays: tuple[Any, ...], static: dict[str, Any]) -> str | None:
    for parameter, gradient, exp_avg, exp_avg_sq in slots(arrays[1:]):
        if reason := unsupported_reason(parameter):
            return reason
        if not is_compatible_dtype(gradient, parameter):
            return f"a gradient of dtype {dtype_name(gradient.dtype)} for a {dtype_name(parameter.dtype)} parameter"
        if exp_avg.dtype != compute_dtype(parameter) or exp_avg_sq.dtype != exp_avg.dtype:
            return f"moments of dtype {dtype_name(exp_avg.dtype)} for a {dtype_name(parameter.dtype)} parameter"
        in_place = parameter, exp_avg, exp_avg_sq
        if not any(all(array.flags[order] for array in in_place) for order in ("C_CONTIGUOUS", "F_CONTIGUOUS")):
            return "arrays are not contiguous, or differ in memory order"
    return None


def _in_order(slot: Slot) -> tuple[Any, ...]:
    """Return a slot with the gradient in the memory order of the parameter."""
    parameter, gradient, exp_avg, exp_avg_sq = slot
    if parameter.flags.c_contiguous:
        return parameter, contiguous(gradient), exp_avg, exp_avg_sq
    return parameter, array_namespace(gradient).asfortranarray(gradient), exp_avg, exp_avg_sq


def _forward(
    grad_scale: Any, *arrays: Any, settings: Settings, weight_decay: Sequence[float], donate: bool, save: bool
) -> tuple[Any, Any]:
    arrays, xp, schedule = tuple(writable(arrays, donate)), array_namespace(*arrays), None
    changing = settings.step_size, settings.bias_correction2, settings.learning_rate
    if any(is_array(number) for number in changing):
        zero = xp.zeros((), dtype=xp.float64)
        schedule = xp.stack([zero + number for number in changing])
        settings = settings._replace(step_size=0.0, bias_correction2=0.0, learning_rate=0.0)
    items = [(*_in_order(slot), rate) for slot, rate in zip(slots(arrays), weight_decay, strict=True)]
    for dtypes, batch in _batches(items, _MAX_SLOTS):
        fields = zip(("parameters", "gradients", "exp_avgs", "exp_avg_sqs"), zip(*batch, strict=True), strict=False)
        columns = {name: [cublas.pointer(array) for array in column] for name, column in fields}
        sizes, rates = tuple(item[0].size for item in batch), tuple(item[4] for item in batch)
        table, blocks = _table(_SLOTS, columns, sizes=sizes, weight_decays=rates)
        scale = None if grad_scale is None else contiguous(grad_scale, compute_dtype(batch[0][0]))
        arguments = table, _BLOCK_ELEMENTS, *map(float, settings), scale, schedule
        cuda_launch.launch("optimizer.adam", dtypes, blocks, _THREADS, *arguments)
    return updated(arrays), None


register(Kernel("cupy.adam", "adam", "cupy", _supports, _forward, None))

# --- squared_norm ----------------------------------------------------------------------------------------------------


def _squared_norm_supports(arrays: tuple[Any, ...], static: dict[str, Any]) -> str | None:
    reasons = (supports_floats((array,), static) for array in arrays)
    if reason := next((reason for reason in reasons if reason), None):
        return reason
    return "mixed dtypes: float64 and others" if len({compute_dtype(array) for array in arrays}) > 1 else None


def _squared_norm_forward(*arrays: Any, save: bool) -> tuple[Any, Any]:
    """Sum the squares per block, then sum these in the order of the arrays."""
    arrays = tuple(contiguous(array) for array in arrays)
    num_blocks = sum(-(-array.size // _BLOCK_ELEMENTS) for array in arrays)
    sums, norm = (empty(arrays[0], shape, compute_dtype(arrays[0])) for shape in ((num_blocks,), ()))
    start = 0
    for dtypes, batch in _batches([(array,) for array in arrays], _MAX_ARRAYS):
        addresses = [cublas.pointer(array) for (array,) in batch]
        table, blocks = _table(_ARRAYS, {"addresses": addresses}, sizes=tuple(array.size for (array,) in batch))
        cuda_launch.launch("optimizer.squares", dtypes, blocks, _THREADS, table, sums[start:], _BLOCK_ELEMENTS)
        start += blocks
    cuda_launch.launch("optimizer.total", dtype_names(sums), 1, 1024, sums, norm, num_blocks)
    return norm, arrays


def _squared_norm_vjp(g: Any, arrays: Any, needs: Any) -> tuple[Any, ...]:
    return tuple(_times_2g(array, g) if needed else None for array, needed in zip(arrays, needs, strict=True))


def _times_2g(x: Any, g: Any) -> Any:
    """Return 2 g x, without reading g on the host."""
    y, g = empty(x), contiguous(g, compute_dtype(x))
    cuda_launch.launch("elementwise.multiply_by_2g", dtype_names(x), *grid_for_elements(x), x, g, y, x.size)
    return y


register(
    Kernel(
        "cupy.squared_norm", "squared_norm", "cupy", _squared_norm_supports, _squared_norm_forward, _squared_norm_vjp
    )
)

# --- cast ------------------------------------------------------------------------------------------------------------


def _cast_supports(arrays: tuple[Any, ...], static: dict[str, Any]) -> str | None:
    rounds_twice = dtype_name(arrays[0].dtype) == "float64" and static["dtype"] not in ("float64", "float32")
    return supports_floats(arrays, static) or ("float64 would be rounded to 16 bits twice" if rounds_twice else None)


def _cast(arrays: Sequence[Any], dtype: Any) -> tuple[Any, ...]:
    pairs = [(x := contiguous(array), empty(x, dtype=dtype)) for array in arrays]
    for dtypes, batch in _batches(pairs, _MAX_PAIRS):
        inputs, outputs = zip(*batch, strict=True)
        columns = {"from": [*map(cublas.pointer, inputs)], "to": [*map(cublas.pointer, outputs)]}
        table, blocks = _table(_PAIRS, columns, sizes=tuple(x.size for x in inputs))
        cuda_launch.launch("optimizer.cast", dtypes, blocks, _THREADS, table, _BLOCK_ELEMENTS)
    return tuple(y for _, y in pairs)


def _cast_forward(*arrays: Any, dtype: str, save: bool) -> tuple[Any, Any]:
    return _cast(arrays, dtype_named(array_namespace(*arrays), dtype)), arrays[0].dtype


def _cast_vjp(g: Any, input_dtype: Any, needs: Any, *, dtype: str) -> tuple[Any, ...]:
    cotangents = iter(_cast([cotangent for cotangent in g if cotangent is not None], input_dtype))
    return tuple(None if cotangent is None else next(cotangents) for cotangent in g)


register(Kernel("cupy.cast", "cast", "cupy", _cast_supports, _cast_forward, _cast_vjp))
