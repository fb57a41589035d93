"""Kernels that read rows on CuPy: norms, softmax, losses, rotation, embedding, and sums over rows in a fixed order.

A warp or a block reads a row once if it fits into its registers.
"""

from __future__ import annotations

import functools
import math
from typing import Any

from xformer.backends import array_namespace, dtype_name
from xformer.kernels.cupy import launch
from xformer.kernels.cupy.launch import FLOATS, contiguous, dtype_names, empty, why_not
from xformer.ops.norms import add_norm_vjp
from xformer.ops.operation import Kernel

# --- Sums over rows (cuda/columns.cu) ---

_SUMMING_THREADS = 256  # per block: 32 times WARPS in cuda/columns.cu


def column_sums(x: Any, dtype: Any, most_blocks: int = 1024) -> Any:
    """Sum a matrix (rows, n) over its rows, in float32 or float64, and return (n,) of `dtype`.

    There are enough blocks for a large device if chunks of 32 rows allow it.
    """
    x, (rows, n) = contiguous(x), x.shape
    tiles = -(-n // (32 * launch.elements_per_thread(x)))
    chunks = max(1, min(-(-rows // 32), most_blocks // max(1, tiles)))
    chunk_rows = max(1, -(-rows // chunks))
    chunks = max(1, -(-rows // chunk_rows))
    sums = empty(x, (n,), dtype) if chunks == 1 else empty(x, (chunks, n), launch.compute_dtype(x))
    dtypes, blocks = dtype_names(x, sums), tiles * chunks
    launch.launch("columns.column_sums", dtypes, blocks, _SUMMING_THREADS, x, sums, rows, n, chunk_rows)
    return sums if chunks == 1 else column_sums(sums, dtype, 1)


# --- Layer norm and RMS norm ---

# Vectors of a row that a thread keeps in registers: R in cuda/norms.cu. The derivative keeps two rows.
_NORM_VECTORS, _NORM_VJP_VECTORS = 4, 2
_MIN_THREADS = 32  # per row, so that a warp does not diverge at the branch for large numbers
_SUMMING_BLOCKS, _SUMMED_THREADS = 256, 2**16  # of the derivative: more blocks would write more sums of their rows


def _norm_why_not(x: Any, weight: Any, *rest: Any, save: bool, **options: Any) -> str | None:
    for parameter in (weight, *rest):
        if parameter is not None and (parameter.dtype != weight.dtype or not launch.is_compatible_dtype(parameter, x)):
            return f"parameters of dtype {dtype_name(parameter.dtype)} with {dtype_name(x.dtype)} rows"
    most = _NORM_VJP_VECTORS * launch.elements_per_thread(x) * launch.MAX_THREADS
    return f"a derivative of rows of more than {most} features" if save and x.shape[-1] > most else why_not(x)


def _add_norm_why_not(x: Any, y: Any, *parameters: Any, **options: Any) -> str | None:
    if x.dtype != y.dtype:
        return f"summands of dtypes {dtype_name(x.dtype)} and {dtype_name(y.dtype)}"
    return _norm_why_not(x, *parameters, **options)


def _normalize(x: Any, other: Any, weight: Any, bias: Any, *settings: Any, keep: bool, save: bool) -> tuple[Any, ...]:
    """Return the sum of x and `other`, or x, its norm, and what the derivative needs."""
    x, other, weight, bias = (None if each is None else contiguous(each) for each in (x, other, weight, bias))
    rows, (centered, epsilon) = launch.row_count(x), settings
    total, y = empty(x) if other is not None and (keep or save) else None, empty(x)
    means, inverses = (empty(x, (rows,), launch.compute_dtype(x)) if save else None for _ in range(2))
    *grid, threads = launch.grid_for_shared_rows(rows, x, _NORM_VECTORS, _MIN_THREADS)
    arrays = x, other, weight, bias, total, y, means, inverses
    sizes = rows, x.shape[-1], int(centered), float(epsilon), threads
    launch.launch("norms.normalize", dtype_names(x, weight), *grid, *arrays, *sizes)
    total = x if other is None else total
    return total, y, (total, weight, means, inverses)


def _norm_forward(
    x: Any, weight: Any, bias: Any = None, *, centered: bool, epsilon: float, save: bool
) -> tuple[Any, Any]:
    return _normalize(x, None, weight, bias, centered, epsilon, keep=False, save=save)[1:]


def _norm_vjp(
    g: Any, residuals: Any, needs: Any, *, centered: bool, epsilon: float = 0.0, addend: Any = None
) -> tuple[Any, ...]:
    """Return the cotangents of x, to which `addend` is added, and of weight and bias."""
    x, weight, means, inverses = residuals
    g, rows, n, has_bias = contiguous(g, x.dtype), launch.row_count(x), x.shape[-1], any(needs[2:])
    addend = None if addend is None else contiguous(addend, x.dtype)
    blocks, *threads = launch.grid_for_shared_rows(rows, x, _NORM_VJP_VECTORS, _MIN_THREADS)
    blocks = min(blocks, max(_SUMMING_BLOCKS, _SUMMED_THREADS // threads[0]))
    dx, sums = empty(x), empty(x, (blocks, n * (1 + has_bias)), launch.compute_dtype(x))
    arrays, sizes = (g, x, weight, means, inverses, addend, dx, sums), (rows, n, int(centered), int(has_bias))
    launch.launch("norms.normalize_vjp", dtype_names(x, weight), blocks, threads[0], *arrays, *sizes, threads[1])
    totals = column_sums(sums, weight.dtype, 1) if any(needs[1:]) else dx[:0]
    return (dx, totals[:n], totals[n:])[: len(needs)]


def _norm_functions(*, centered: bool) -> tuple[Any, Any]:
    return functools.partial(_norm_forward, centered=centered), functools.partial(_norm_vjp, centered=centered)


def _add_norm_forward(*arrays: Any, epsilon: float, centered: bool, keep_sum: bool, save: bool) -> tuple[Any, Any]:
    total, norm, residuals = _normalize(*arrays, centered, epsilon, keep=keep_sum, save=save)
    return (total, norm) if keep_sum else norm, residuals


# --- Softmax ---

_SOFTMAX_VECTORS = 2  # loads per thread of rows that a warp cannot load at once; as many numbers fit into registers


def _strided(mask: Any, shape: tuple[int, ...]) -> tuple[Any, int, int, tuple[int, ...]]:
    """View a mask broadcast to `shape` with the axes (outer, middle, inner, last).

    The mask is copied only if more axes have other strides.

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
        dtypes = dtype_names(logits, g, logits)
        launch.launch("columns.scale_rows", dtypes, *grid, logits, g, logits, rows, logits.shape[-1])
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
    rows: Any = x if is_readable else xp.reshape(contiguous(x), (math.prod(outer), 1, length, size))
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
    Kernel(f"cupy.{name}", name, "cupy", forward, vjp, dtypes, refusal)
    for name, forward, vjp, dtypes, refusal in (
        ("layer_norm", *_norm_functions(centered=True), None, _norm_why_not),
        ("rms_norm", *_norm_functions(centered=False), None, _norm_why_not),
        ("add_norm", _add_norm_forward, functools.partial(add_norm_vjp, _norm_vjp), None, _add_norm_why_not),
        ("softmax", _softmax_forward, _softmax_vjp, FLOATS, why_not),
        ("cross_entropy", _cross_entropy_forward, _cross_entropy_vjp, FLOATS, why_not),
        ("logsumexp", _logsumexp_forward, None, FLOATS, why_not),
        ("top_k", _top_k_forward, None, FLOATS, _top_k_why_not),
        ("rotate", _rotate_forward, _rotate_vjp, FLOATS, why_not),
        ("embedding", _embedding_forward, _embedding_vjp, FLOATS, _embedding_why_not),
    )
]
