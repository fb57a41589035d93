"""Kernels that read or write many arrays in one launch on CuPy: Adam, sums of squares and casts."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from xformer.backends import array_namespace, dtype_name
from xformer.kernels.cupy import cublas, launch
from xformer.kernels.cupy.launch import FLOATS, contiguous, dtype_names, empty, why_not
from xformer.ops.operation import Kernel
from xformer.ops.optimizers import Settings, Slot, slots, updated, writable
from xformer.tree import is_array

BLOCK_ELEMENTS = 8192
THREADS = 256
# Tables of cuda/optimizer.cu; with the other arguments they fit in the 4 KiB that every device accepts.
MAX_ITEMS = {4: 64, 1: 128, 2: 112}  # by the number of arrays of an item
_FIELDS: dict[int, list[Any]] = {
    columns: [("addresses", np.uint64, (columns, most)), ("sizes", np.int64, most), ("ends", np.int64, most)]
    for columns, most in MAX_ITEMS.items()
}


def tables(
    items: Sequence[tuple[Any, ...]], weight_decay: Sequence[float] = ()
) -> Iterator[tuple[tuple[str, ...], Any, int]]:
    """Yield dtypes, a table, which is passed by value, and the number of blocks for some of the items (array, ...).

    Items are grouped by the dtypes of their first two entries; empty arrays are left out.
    """
    columns, most = len(items[0]), MAX_ITEMS[len(items[0])]
    groups: dict[tuple[str, ...], list[int]] = {}
    for place, item in enumerate(items):
        if item[0].size:
            groups.setdefault(dtype_names(*item[:2]), []).append(place)
    for dtypes, places in groups.items():
        for start in range(0, len(places), most):
            batch = places[start : start + most]
            rates = tuple(weight_decay[place] for place in batch) if weight_decay else ()
            constants, blocks = _table(columns, tuple(items[place][0].size for place in batch), rates)
            table, addresses = constants.copy(), (map(cublas.pointer, items[place]) for place in batch)
            table["addresses"][0, :, : len(batch)] = [*zip(*addresses, strict=True)]
            yield dtypes, table, blocks


@functools.lru_cache(maxsize=256)
def _table(columns: int, sizes: tuple[int, ...], rates: tuple[float, ...]) -> tuple[Any, int]:
    """Return what is the same in every step, and the number of blocks."""
    fields = _FIELDS[columns]
    table = np.zeros(1, [*fields, *([("weight_decays", np.float64, fields[-1][-1])] if rates else [])])
    ends = list(itertools.accumulate(-(-size // BLOCK_ELEMENTS) for size in sizes))
    for name, column in (("sizes", sizes), ("ends", ends), *([("weight_decays", rates)] if rates else [])):
        table[name][0, : len(column)] = column
    return table, ends[-1]


def _cast_why_not(x: Any, *arrays: Any, dtype: str, **options: Any) -> str | None:
    if dtype_name(x.dtype) == "float64" and dtype not in ("float64", "float32"):
        return "float64 would be rounded to 16 bits twice"
    return why_not(x)


def _cast(arrays: Sequence[Any], dtype: Any) -> tuple[Any, ...]:
    pairs = [(x := contiguous(array), empty(x, dtype=dtype)) for array in arrays]
    for dtypes, table, blocks in tables(pairs):
        launch.launch("optimizer.cast", dtypes, blocks, THREADS, table, BLOCK_ELEMENTS)
    return tuple(y for _, y in pairs)


def _cast_forward(*arrays: Any, dtype: str, save: bool) -> tuple[Any, Any]:
    return _cast(arrays, array_namespace(*arrays).dtype_named(dtype)), arrays[0].dtype


def _cast_vjp(g: Any, input_dtype: Any, needs: Any, *, dtype: str) -> tuple[Any, ...]:
    cotangents = iter(_cast([cotangent for cotangent in g if cotangent is not None], input_dtype))
    return tuple(None if cotangent is None else next(cotangents) for cotangent in g)


def _adam_why_not(grad_scale: Any, *arrays: Any, **options: Any) -> str | None:
    for parameter, gradient, exp_avg, exp_avg_sq in slots(arrays):
        if reason := why_not(parameter):
            return reason
        if not launch.is_compatible_dtype(gradient, parameter):
            return f"a gradient of dtype {dtype_name(gradient.dtype)} for a {dtype_name(parameter.dtype)} parameter"
        if exp_avg.dtype != launch.compute_dtype(parameter) or exp_avg_sq.dtype != exp_avg.dtype:
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


def _adam_forward(
    grad_scale: Any, *arrays: Any, settings: Settings, weight_decay: Sequence[float], donate: bool, save: bool
) -> tuple[Any, Any]:
    arrays, xp, schedule = tuple(writable(arrays, donate)), array_namespace(*arrays), None
    changing = settings.step_size, settings.bias_correction2, settings.learning_rate
    if any(is_array(number) for number in changing):
        zero = xp.zeros((), dtype=xp.float64)
        schedule = xp.stack([zero + number for number in changing])
        settings = settings._replace(step_size=0.0, bias_correction2=0.0, learning_rate=0.0)
    items = [_in_order(slot) for slot in slots(arrays)]
    for dtypes, table, blocks in tables(items, weight_decay):
        scale = None
        if grad_scale is not None:
            scale = contiguous(grad_scale, xp.float64 if dtypes[0] == "float64" else xp.float32)
        arguments = table, BLOCK_ELEMENTS, *map(float, settings), scale, schedule
        launch.launch("optimizer.adam", dtypes, blocks, THREADS, *arguments)
    return updated(arrays), None


def _norm_why_not(*arrays: Any, **options: Any) -> str | None:
    if len({launch.compute_dtype(array) for array in arrays}) > 1:
        return "mixed dtypes: float64 and others"
    return next((reason for reason in map(why_not, arrays) if reason), None)


def _norm_forward(*arrays: Any, save: bool) -> tuple[Any, Any]:
    """Sum the squares per block, then sum these in the order of the arrays."""
    arrays = tuple(contiguous(array) for array in arrays)
    num_blocks = sum(-(-array.size // BLOCK_ELEMENTS) for array in arrays)
    sums, norm = (empty(arrays[0], shape, launch.compute_dtype(arrays[0])) for shape in ((num_blocks,), ()))
    start = 0
    for dtypes, table, blocks in tables([(array,) for array in arrays]):
        launch.launch("optimizer.squares", dtypes, blocks, THREADS, table, sums[start:], BLOCK_ELEMENTS)
        start += blocks
    launch.launch("optimizer.total", dtype_names(sums), 1, 1024, sums, norm, num_blocks)
    return norm, arrays


def _norm_vjp(g: Any, arrays: Any, needs: Any) -> tuple[Any, ...]:
    xp = array_namespace(*arrays)
    twice = 2.0 * xp.astype(g, launch.compute_dtype(arrays[0]))
    return tuple(xp.astype(x * twice, x.dtype) if needed else None for x, needed in zip(arrays, needs, strict=True))


KERNELS = [
    Kernel("cupy.cast", "cast", "cupy", _cast_forward, _cast_vjp, dtypes=FLOATS, why_not=_cast_why_not),
    Kernel("cupy.adam", "adam", "cupy", _adam_forward, None, why_not=_adam_why_not),
    Kernel("cupy.squared_norm", "squared_norm", "cupy", _norm_forward, _norm_vjp, why_not=_norm_why_not),
]
