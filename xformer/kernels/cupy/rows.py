"""Kernels that read rows on CuPy: norms, softmax, losses, rotation, embedding, and sums over rows in a fixed order.

A warp or a block reads a row once if it fits into its registers.
"""

from __future__ import annotations

import math
from typing import Any

from xformer.backends import array_namespace, dtype_name
from xformer.kernels.cupy import cublas, launch
from xformer.kernels.cupy.launch import FLOATS, contiguous, dtype_names, empty, why_not
from xformer.ops.operation import Kernel

# --- Sums over rows (cuda/columns.cu) ---

SUMMING_THREADS = 256  # per block; SUMMING_WARPS in cuda/common.cu


def grid_for_columns(x: Any, rows: int) -> tuple[int, int, int]:
    """Return the blocks, chunks of rows and rows per chunk for sums over the rows of x.

    There are enough blocks for a large device if chunks of 32 rows allow it.
    """
    tiles = -(-x.shape[-1] // (32 * launch.elements_per_thread(x)))
    chunks = max(1, min(-(-rows // 32), 1024 // max(1, tiles)))
    chunk_rows = max(1, -(-rows // chunks))
    chunks = max(1, -(-rows // chunk_rows))
    return tiles * chunks, chunks, chunk_rows


def column_sums(x: Any, dtype: Any) -> Any:
    """Sum a matrix (rows, n) over its rows, in float32 or float64, and return (n,) of `dtype`."""
    x = contiguous(x)
    blocks, chunks, chunk_rows = grid_for_columns(x, len(x))
    if chunks == 1:
        return column_total(x, dtype)
    sums = empty(x, (chunks, x.shape[1]), launch.compute_dtype(x))
    _sum_chunks(x, sums, blocks, chunk_rows)
    return column_total(sums, dtype)


def column_total(x: Any, dtype: Any) -> Any:
    """Sum a matrix of few rows over its rows in one launch."""
    total = empty(x, x.shape[1:], dtype)
    _sum_chunks(x, total, -(-x.shape[1] // (32 * launch.elements_per_thread(x))), len(x))
    return total


def _sum_chunks(x: Any, sums: Any, blocks: int, chunk_rows: int) -> None:
    dtypes = dtype_names(x, sums)
    launch.launch("columns.column_sums", dtypes, blocks, SUMMING_THREADS, x, sums, *x.shape, chunk_rows)


# --- Layer norm and RMS norm ---

# Vectors of a row that a thread keeps in registers: R in cuda/norms.cu. The derivative keeps two rows.
_NORM_VECTORS, _NORM_VJP_VECTORS = 4, 2
_MIN_THREADS = 32  # per row, so that a warp does not diverge at the branch for large numbers
_SUMMING_BLOCKS, _SUMMED_THREADS = 256, 2**16  # of the derivative: more blocks would write more sums of their rows


def _norm_why_not(x: Any, weight: Any, *rest: Any, **options: Any) -> str | None:
    for parameter in (weight, *rest):
        if parameter is not None and (parameter.dtype != weight.dtype or not launch.is_compatible_dtype(parameter, x)):
            return f"parameters of dtype {dtype_name(parameter.dtype)} with {dtype_name(x.dtype)} rows"
    return why_not(x)


def _add_norm_why_not(x: Any, y: Any, *parameters: Any, **options: Any) -> str | None:
    if x.dtype != y.dtype:
        return f"summands of dtypes {dtype_name(x.dtype)} and {dtype_name(y.dtype)}"
    return _norm_why_not(x, *parameters)


def _norm_forward(
    x: Any, weight: Any, bias: Any, centered: bool, epsilon: float, save: bool, other: Any = None, keep_sum: bool = True
) -> tuple[Any, ...]:
    """Return the sum of x and `other`, or x, its norm, and what the derivative needs."""
    x, weight, bias = contiguous(x), contiguous(weight), None if bias is None else contiguous(bias)
    other = None if other is None else contiguous(other)
    rows, n = launch.row_count(x), x.shape[-1]
    y = empty(x)
    means, inverses = (empty(x, (rows,), launch.compute_dtype(x)) if save else None for _ in range(2))
    *grid, threads = launch.grid_for_shared_rows(rows, x, _NORM_VECTORS, _MIN_THREADS)
    total = None
    if other is not None and (keep_sum or save or not _fits_registers(threads, x, other, weight, bias)):
        total = empty(x)  # which is read again
    arrays = x, other, weight, bias, total, y, means, inverses
    settings = rows, n, int(centered), float(epsilon), threads
    launch.launch("norms.normalize", dtype_names(x, weight), *grid, *arrays, *settings)
    total = x if other is None else total
    return total, y, (total, weight, means, inverses)


def _fits_registers(threads: int, x: Any, *arrays: Any) -> bool:
    """Return whether the forward kernel keeps rows in registers: they are not long, and all vectors are aligned."""
    is_long = launch.is_long(x, _NORM_VECTORS, threads) or x.shape[-1] % launch.elements_per_thread(x)
    return not is_long and not any(cublas.pointer(each) % 16 for each in (x, *arrays) if each is not None)


def _norm_vjp(
    g: Any, residuals: Any, centered: bool, needs: tuple[bool, bool, bool], addend: Any = None
) -> tuple[Any, ...]:
    """Return the cotangents of x, to which `addend` is added, and of weight and bias; None if not needed."""
    x, weight, means, inverses = residuals
    g, rows, n = contiguous(g, x.dtype), launch.row_count(x), x.shape[-1]
    addend = None if addend is None else contiguous(addend, x.dtype)
    dtypes, arrays = dtype_names(x, weight), (g, x, weight, means, inverses, addend)
    *grid, threads = launch.grid_for_shared_rows(rows, x, _NORM_VJP_VECTORS, _MIN_THREADS)
    needs_sums, is_long = needs[1] or needs[2], launch.is_long(x, _NORM_VJP_VECTORS, threads) or not rows
    dx = empty(x) if needs[0] or (needs_sums and not is_long) else None
    if needs_sums and not is_long:
        grid[0] = min(grid[0], max(_SUMMING_BLOCKS, _SUMMED_THREADS // grid[1]))
        sums = empty(x, (grid[0], n * (2 if needs[2] else 1)), launch.compute_dtype(x))
        settings = rows, n, int(centered), int(needs[2]), threads
        launch.launch("norms.normalize_vjp_with_sums", dtypes, *grid, *arrays, dx, sums, *settings)
        totals = column_total(sums, weight.dtype)
        return dx, totals[:n], totals[n:] if needs[2] else None
    if dx is not None:
        launch.launch("norms.normalize_vjp", dtypes, *grid, *arrays, dx, rows, n, int(centered), threads)
    if not needs_sums:
        return dx, None, None
    xp, dtype = array_namespace(x), means.dtype  # rows that are too long for registers
    hat = (xp.astype(xp.reshape(x, (rows, n)), dtype) - means[:, None]) * inverses[:, None]
    g = xp.reshape(g, (rows, n))
    dweight = column_sums(xp.astype(g, dtype) * hat, weight.dtype)
    return dx, dweight, column_sums(g, weight.dtype) if needs[2] else None


def _layer_norm_forward(x: Any, weight: Any, bias: Any, *, epsilon: float, save: bool) -> tuple[Any, Any]:
    _, y, residuals = _norm_forward(x, weight, bias, True, epsilon, save)
    return y, residuals


def _layer_norm_vjp(g: Any, residuals: Any, needs: Any, *, epsilon: float) -> tuple[Any, ...]:
    return _norm_vjp(g, residuals, True, needs)


def _rms_norm_forward(x: Any, weight: Any, *, epsilon: float, save: bool) -> tuple[Any, Any]:
    _, y, residuals = _norm_forward(x, weight, None, False, epsilon, save)
    return y, residuals


def _rms_norm_vjp(g: Any, residuals: Any, needs: Any, *, epsilon: float) -> tuple[Any, ...]:
    return _norm_vjp(g, residuals, False, (*needs, False))[:2]


def _add_norm_forward(
    x: Any, y: Any, weight: Any, bias: Any, *, epsilon: float, centered: bool, keep_sum: bool, save: bool
) -> tuple[Any, Any]:
    total, norm, residuals = _norm_forward(x, weight, bias, centered, epsilon, save, y, keep_sum)
    return (total, norm) if keep_sum else norm, residuals


def _add_norm_vjp(
    g: Any, residuals: Any, needs: Any, *, epsilon: float, centered: bool, keep_sum: bool
) -> tuple[Any, ...]:
    g_sum, g = g if keep_sum else (None, g)
    if g is None:
        return g_sum, g_sum, None, None
    dx, dweight, dbias = _norm_vjp(g, residuals, centered, (needs[0] or needs[1], *needs[2:]), g_sum)
    return dx, dx, dweight, dbias


# --- Softmax ---

_SOFTMAX_VECTORS = 2  # loads per thread of rows that a warp cannot load at once; as many numbers fit into registers


def _strided(mask: Any, shape: tuple[int, ...]) -> tuple[Any, int, int, tuple[int, ...]]:
    """View a mask broadcast to `shape` with the axes (outer, middle, inner, last).

    The mask is copied only if more axes have strides of their own.

    Returns:
        The mask, the sizes `middle` and `inner`, and the strides of all four axes.
    """
    xp = array_namespace(mask)
    mask = xp.broadcast_to(mask, shape)
    axes: list[tuple[int, int]] = []  # sizes and strides of all axes but the last
    for size, stride in zip(shape[:-1], mask.strides[:-1], strict=True):
        if axes and axes[-1][1] == stride * size:
            axes[-1] = axes[-1][0] * size, stride  # merge the two axes
        elif size != 1:
            axes.append((size, stride))
    if len(axes) > 3:
        return _strided(xp.reshape(contiguous(mask), (-1, shape[-1])), (math.prod(shape[:-1]), shape[-1]))
    outer, middle, inner = [(1, 0)] * (3 - len(axes)) + axes
    return mask, middle[0], inner[0], (outer[1], middle[1], inner[1], mask.strides[-1])


def _softmax_forward(x: Any, mask: Any, *, save: bool) -> tuple[Any, Any]:
    x, rows = contiguous(x), launch.row_count(x)
    y = empty(x)
    if x.size:
        mask, middle, inner, strides = (None, 1, 1, (0, 0, 0, 0)) if mask is None else _strided(mask, x.shape)
        sizes, vectors = (rows, x.shape[-1], middle, inner), launch.vectors_per_thread(x, _SOFTMAX_VECTORS)
        *grid, threads = launch.grid_for_shared_rows(rows, x, vectors)
        template = *dtype_names(x), str(vectors)
        launch.launch("softmax.softmax", template, *grid, x, mask, y, *sizes, *strides, threads)
    return y, y


def _softmax_vjp(g: Any, y: Any, needs: Any) -> tuple[Any, ...]:
    g, rows = contiguous(g, y.dtype), launch.row_count(y)
    dx = empty(y)
    *grid, threads = launch.grid_for_shared_rows(rows, y, _SOFTMAX_VECTORS)
    launch.launch("softmax.softmax_vjp", dtype_names(y), *grid, g, y, dx, rows, y.shape[-1], threads)
    return dx, None


# --- Cross-entropy: one pass computes the maximum of a row and its sum of exponentials, and then the gradient ---

_LOSS_VECTORS = 2  # that a thread loads at a time: R in cuda/softmax.cu


def _cross_entropy_forward(
    logits: Any, labels: Any, *, pad_id: int, label_smoothing: float, z_loss: float, save: bool
) -> tuple[Any, Any]:
    """Save the gradient of the sum of the losses; of float16, which losses are scaled for, the logits."""
    logits, labels = contiguous(logits), contiguous(labels, array_namespace(labels).int64)
    dlogits = empty(logits) if save and dtype_name(logits.dtype) != "float16" else None
    losses = _launch_cross_entropy(logits, labels, None, dlogits, pad_id, label_smoothing, z_loss)
    return losses, (logits, labels) if dlogits is None else dlogits


def _launch_cross_entropy(logits: Any, labels: Any, g: Any, dlogits: Any, pad_id: int, *settings: float) -> Any:
    losses, rows = empty(logits, labels.shape, launch.compute_dtype(logits)), launch.row_count(logits)
    grid, sizes = launch.grid_for_rows(rows, logits, _LOSS_VECTORS), (rows, logits.shape[-1], pad_id)
    arrays = logits, labels, g, losses, dlogits
    launch.launch("softmax.cross_entropy", dtype_names(logits), *grid, *arrays, *sizes, *map(float, settings))
    return losses


def _cross_entropy_vjp(
    g: Any, residuals: Any, needs: Any, *, pad_id: int, label_smoothing: float, z_loss: float
) -> tuple[Any, ...]:
    logits, labels = residuals if isinstance(residuals, tuple) else (residuals, None)
    g, rows = contiguous(g, launch.compute_dtype(logits)), launch.row_count(logits)
    if labels is None:
        grid = launch.grid_for_rows(rows, logits)
        launch.launch("softmax.scale_rows", dtype_names(logits), *grid, g, logits, rows, logits.shape[-1])
        return logits, None
    dlogits = empty(logits)
    _launch_cross_entropy(logits, labels, g, dlogits, pad_id, label_smoothing, z_loss)
    return dlogits, None


# --- Decoding ---

_MAX_K = 1024
_SMALL = 256  # elements of a row that a warp takes up at once
_BUFFER_BYTES = 2**15  # of S items in cuda/topk.cu


def _logsumexp_forward(x: Any, *, save: bool) -> tuple[Any, Any]:
    x, rows = contiguous(x), launch.row_count(x)
    outputs = tuple(empty(x, (*x.shape[:-1], 1)) for _ in range(2))
    grid = launch.grid_for_rows(rows, x, _LOSS_VECTORS)
    launch.launch("softmax.logsumexp", dtype_names(x), *grid, x, *outputs, rows, x.shape[-1])
    return outputs, None


def _top_k_forward(x: Any, *, k: int, save: bool) -> tuple[Any, Any]:
    x, rows, shape = contiguous(x), launch.row_count(x), (*x.shape[:-1], k)
    values, indices = empty(x, shape), empty(x, shape, array_namespace(x).int64)
    (blocks, threads), n = launch.grid_for_rows(rows, x), x.shape[-1]
    size = _BUFFER_BYTES // (16 if x.itemsize == 8 else 8)
    size, threads = (_SMALL, 32) if n <= _SMALL else (size, min(threads, size // (2 * launch.elements_per_thread(x))))
    launch.launch("topk.top_k", (*dtype_names(x), str(size)), blocks, threads, x, values, indices, rows, n, k)
    return (values, indices), None


def _top_k_why_not(x: Any, *, k: int, **options: Any) -> str | None:
    return why_not(x) if 1 <= k <= min(_MAX_K, x.shape[-1]) else f"k is {k}; expected 1 to {_MAX_K}"


# --- Rotation of pairs of features ---


def _rotate(sign: float, x: Any, cosine: Any, sine: Any) -> Any:
    """Rotate, and write the result in the order of layers: (batch, length, heads, head_dim)."""
    xp, (*outer, length, size), half = array_namespace(x), x.shape, cosine.shape[1]
    is_readable = x.ndim == 4 and x.strides[3] == x.itemsize and min(x.strides) > 0
    rows = x if is_readable else xp.reshape(contiguous(x), (math.prod(outer), 1, length, size))
    batch, heads = rows.shape[:2]
    y = empty(x, (batch, length, heads, size))
    grid = launch.grid_for_rows(batch * length if x.size else 0, xp.reshape(y, (batch, length, heads * size)), 2)
    steps = (stride // x.itemsize for stride in rows.strides[:3])
    arrays, sizes = (rows, contiguous(cosine), contiguous(sine), y), (batch, heads, length, size, half)
    launch.launch("rotate.rotate", dtype_names(x), *grid, *arrays, *sizes, *steps, sign)
    return xp.reshape(xp.permute_dims(y, (0, 2, 1, 3)), x.shape)


def _rotate_forward(x: Any, cosine: Any, sine: Any, *, save: bool) -> tuple[Any, Any]:
    return _rotate(1.0, x, cosine, sine), (cosine, sine)


def _rotate_vjp(g: Any, residuals: Any, needs: Any) -> tuple[Any, ...]:
    return _rotate(-1.0, g, *residuals), None, None


# --- Embedding, whose derivative sums the rows of an id in one order ---

_SEGMENT = 64  # sorted ids whose rows one block sums


def _embedding_forward(weight: Any, ids: Any, *, scale: float, save: bool) -> tuple[Any, Any]:
    ids = contiguous(ids, array_namespace(ids).int64)
    rows, n = weight.shape
    y = empty(weight, (*ids.shape, n))
    blocks = launch.grid_for_rows(ids.size, weight)
    sizes = ids.size, rows, n, float(scale)
    launch.launch("embedding.gather", dtype_names(weight), *blocks, weight, ids, y, *sizes)
    return y, (ids, weight)


def _embedding_vjp(g: Any, residuals: Any, needs: Any, *, scale: float) -> tuple[Any, ...]:
    """Sort the ids, and sum the rows of each id in their order, in float32 or float64."""
    ids, weight = residuals
    xp, g = array_namespace(g), contiguous(g, weight.dtype)
    dweight = xp.zeros(weight.shape, dtype=weight.dtype)
    count, (rows, n) = ids.size, weight.shape
    if count:
        ids = xp.reshape(ids, (-1,))
        order = xp.argsort(ids, stable=True)
        sorted_ids = xp.take(ids, order, axis=0)
        segments = -(-count // _SEGMENT)
        heads, tails = (empty(g, (segments, n), launch.compute_dtype(g)) for _ in range(2))
        sizes = count, rows, n, _SEGMENT
        arrays = g, order, sorted_ids, dweight, heads, tails
        settings = *sizes, float(scale)
        launch.launch("embedding.scatter_segments", dtype_names(g), *launch.grid_for_rows(count, g), *arrays, *settings)
        grid = launch.grid_for_rows(segments - 1, g)
        launch.launch("embedding.scatter_join", dtype_names(g), *grid, sorted_ids, heads, tails, dweight, *sizes)
    return dweight, None


def _embedding_why_not(weight: Any, ids: Any, **options: Any) -> str | None:
    return why_not(weight) if weight.flags.c_contiguous else "the weight is not contiguous"


KERNELS = [
    Kernel("cupy.layer_norm", "layer_norm", "cupy", _layer_norm_forward, _layer_norm_vjp, why_not=_norm_why_not),
    Kernel("cupy.rms_norm", "rms_norm", "cupy", _rms_norm_forward, _rms_norm_vjp, why_not=_norm_why_not),
    Kernel("cupy.add_norm", "add_norm", "cupy", _add_norm_forward, _add_norm_vjp, why_not=_add_norm_why_not),
    *(
        Kernel(f"cupy.{name}", name, "cupy", forward, vjp, dtypes=FLOATS, why_not=refusal)
        for name, forward, vjp, refusal in (
            ("softmax", _softmax_forward, _softmax_vjp, why_not),
            ("cross_entropy", _cross_entropy_forward, _cross_entropy_vjp, why_not),
            ("logsumexp", _logsumexp_forward, None, why_not),
            ("top_k", _top_k_forward, None, _top_k_why_not),
            ("rotate", _rotate_forward, _rotate_vjp, why_not),
            ("embedding", _embedding_forward, _embedding_vjp, _embedding_why_not),
        )
    ),
]
