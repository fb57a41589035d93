"""Linear maps of several experts on CuPy, in a number of launches that does not depend on that of the experts.

The rows are sorted by expert. Those of an expert are copied to whole tiles, and cuBLAS multiplies each tile by a weight
whose address a kernel looked up, so no value is read on the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from xformer.backends import array_namespace
from xformer.errors import ShapeError
from xformer.kernels.cupy import cublas, launch
from xformer.kernels.cupy.launch import FLOATS, compute_dtype, contiguous, dtype_names, empty, grid_for_rows
from xformer.native import is_reproducible
from xformer.ops.experts import Expert
from xformer.ops.operation import Kernel

MAX_EXPERTS, THREADS = 448, 512  # of cuda/experts.cu
_ADDRESSES = np.dtype([("of", np.uint64, MAX_EXPERTS)])
_ROWS = 16  # the smallest tile, and the steps between sizes


class _Layout(NamedTuple):
    """Positions of the rows of each expert for cuda/experts.cu, and the numbers of experts, tiles, and rows of each."""

    array: Any
    experts: int
    tiles: int
    tile: int


def _why_not(x: Any, expert_indices: Any, *arrays: Any, experts: tuple[Expert, ...], **options: Any) -> str | None:
    first, each = arrays[0], experts[0].num_arrays
    if not all(expert.is_affine and expert.num_arrays == each for expert in experts):
        return "the experts are not linear maps with arrays as weights, all of them with a bias or none"
    if any(w.shape != first.shape or w.strides != first.strides for w in arrays[::each]) or 0 in first.shape:
        return "the weights differ in shape or memory order, or are empty"
    if any(array.dtype != x.dtype for array in arrays) or not (first.flags.c_contiguous or first.flags.f_contiguous):
        return "the weights have another dtype than the rows, or are not contiguous"
    if len(experts) > MAX_EXPERTS:
        return f"{len(experts)} experts (the kernel takes {MAX_EXPERTS})"
    return "XFORMER_REPRODUCIBLE=1" if is_reproducible() else launch.why_not(x)


def _addresses(arrays: Sequence[Any]) -> Any:
    table = np.zeros(1, _ADDRESSES)
    table["of"][0, : len(arrays)] = [cublas.pointer(array) for array in arrays]
    return table


def _multiply(x: Any, indices: Any, weights: Sequence[Any], biases: Sequence[Any]) -> tuple[Any, _Layout, Any]:
    """Return each row times the weight of its expert plus the bias, the layout, and the rows in tiles.

    There are at most three tiles for each expert, and one for each row.
    """
    xp, (rows, depth), columns, experts = array_namespace(x), x.shape, weights[0].shape[1], len(weights)
    tile = max(1, -(-rows // (2 * experts * _ROWS))) * _ROWS
    tiles = min(rows, rows // tile + experts)
    layout = _Layout(xp.empty(2 * experts + 2 + tiles, dtype=xp.int64), experts, tiles, tile)
    operands, products = xp.empty((3, tiles), dtype=xp.int64), empty(x, (tiles, tile, columns))
    padded, y = empty(x, (tiles, tile, depth)), empty(x, (rows, columns))
    arrays = indices, _addresses(weights), padded, products, layout.array, operands
    sizes = rows, experts, tile, tiles, depth, columns
    launch.launch("experts.route", dtype_names(x), 1, THREADS, *arrays, *sizes)
    _fill(x, layout, padded)
    if tiles:
        cublas.product_at(operands, padded[0], weights[0], products[0])
    results = products, indices, layout.array, _addresses(biases), y
    launch.launch("experts.collect", dtype_names(x), *grid_for_rows(rows, y), *results, rows, experts, tile, columns)
    return y, layout, padded


def _fill(x: Any, layout: _Layout, padded: Any) -> None:
    places = layout.tiles * layout.tile
    sizes = places, layout.experts, layout.tile, x.shape[1]
    launch.launch("experts.fill_tiles", dtype_names(x), *grid_for_rows(places, x), x, layout.array, padded, *sizes)


def _sum_tiles(parts: Any, layout: _Layout, dtype: Any) -> list[Any]:
    """Return the sum of the matrices (tiles, height, columns) of each expert."""
    sums = empty(parts, (layout.experts, *parts.shape[1:]), dtype)
    grid = grid_for_rows(layout.experts * parts.shape[1], parts)
    launch.launch("experts.sum_tiles", dtype_names(parts, sums), *grid, parts, layout.array, sums, *sums.shape)
    return [sums[expert] for expert in range(layout.experts)]


def _forward(x: Any, expert_indices: Any, *arrays: Any, experts: tuple[Expert, ...], save: bool) -> tuple[Any, Any]:
    x, indices = contiguous(x), contiguous(expert_indices, array_namespace(x).int64)
    weights, biases = arrays[:: experts[0].num_arrays], arrays[1::2] if experts[0].num_arrays == 2 else ()
    shape = tuple(weights[0].shape)
    if x.shape[1] != shape[0] or any(bias.shape != shape[1:] for bias in biases):  # cuBLAS gets addresses alone
        raise ShapeError(f"experts got x of shape {tuple(x.shape)} and weights of shape {shape}; expected what fits")
    return _multiply(x, indices, weights, [contiguous(bias) for bias in biases])[0], (x, indices, weights)


def _vjp(g: Any, residuals: Any, needs: Any, *, experts: tuple[Expert, ...]) -> tuple[Any, ...]:
    x, indices, weights = residuals
    each, cotangents, dtype = experts[0].num_arrays, [None] * len(needs), compute_dtype(x)
    dx, layout, g_tiles = _multiply(contiguous(g, x.dtype), indices, [weight.T for weight in weights], ())
    if any(needs[2::each]):
        x_tiles = empty(x, (layout.tiles, layout.tile, x.shape[1]))
        _fill(x, layout, x_tiles)
        parts = cublas.batched_product(x_tiles.swapaxes(1, 2), g_tiles, dtype=dtype)
        cotangents[2::each] = _sum_tiles(parts, layout, x.dtype)
    if each == 2 and any(needs[3::2]):
        ones = array_namespace(x).ones((layout.tiles, 1, layout.tile), dtype=x.dtype)
        parts = cublas.batched_product(ones, g_tiles, dtype=dtype)
        cotangents[3::2] = [total[0] for total in _sum_tiles(parts, layout, x.dtype)]
    return dx, *(cotangent if needed else None for cotangent, needed in zip(cotangents[1:], needs[1:], strict=True))


KERNELS = [Kernel("cupy.experts", "experts", "cupy", _forward, _vjp, dtypes=FLOATS, why_not=_why_not)]
