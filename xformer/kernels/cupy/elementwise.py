"""Activations, dropout and the look-up of embeddings on CuPy."""

from __future__ import annotations

from typing import Any

from xformer.backends import array_namespace, dtype_name
from xformer.kernels.cupy import launch as cuda_launch
from xformer.kernels.cupy.support import contiguous, empty, flat_blocks, floats, names, row_blocks, wide
from xformer.kernels.registry import Kernel, register

# --- relu, gelu and dropout ------------------------------------------------------------------------------------------


def _mapped(kernel: str, x: Any, *others: Any, settings: tuple[float, ...] = ()) -> Any:
    """A function of the elements of x and of other arrays; those are C-contiguous."""
    x = contiguous(x)
    y = empty(x)
    cuda_launch.launch(f"elementwise.{kernel}", names(x), *flat_blocks(x), x, *others, y, x.size, *settings)
    return y


def relu_forward(x: Any, *, save: bool) -> tuple[Any, Any]:
    """max(x, 0), which is all that the derivative needs."""
    y = _mapped("relu", x)
    return y, y


def relu_vjp(g: Any, y: Any, needs: Any) -> tuple[Any, ...]:
    """g where y, what the forward returned, is positive."""
    return (_mapped("relu_vjp", g, y),)


def _gelu_forward(x: Any, *, save: bool) -> tuple[Any, Any]:
    x = contiguous(x)
    return _mapped("gelu", x), x


def _gelu_vjp(g: Any, x: Any, needs: Any) -> tuple[Any, ...]:
    return (_mapped("gelu_vjp", g, x),)


def _dropout_supports(arrays: tuple[Any, ...], static: dict[str, Any]) -> str | None:
    x, keep = arrays
    if dtype_name(keep.dtype) != "bool":
        return f"keep of dtype {dtype_name(keep.dtype)} (kernels take bool)"
    return floats(arrays, static) if x.shape == keep.shape else "keep is broadcast"


def _dropout_forward(x: Any, keep: Any, *, keep_probability: float, save: bool) -> tuple[Any, Any]:
    keep = contiguous(keep)
    return _mapped("dropout", x, keep, settings=(1.0 / keep_probability,)), keep


def _dropout_vjp(g: Any, keep: Any, needs: Any, *, keep_probability: float) -> tuple[Any, ...]:
    return _mapped("dropout", g, keep, settings=(1.0 / keep_probability,)), None


register(Kernel("cupy.relu", "relu", "cupy", floats, relu_forward, relu_vjp))
register(Kernel("cupy.gelu", "gelu", "cupy", floats, _gelu_forward, _gelu_vjp))
register(Kernel("cupy.dropout", "dropout", "cupy", _dropout_supports, _dropout_forward, _dropout_vjp))

# --- embedding -------------------------------------------------------------------------------------------------------

_PIECE = 64  # sorted places whose rows one block sums


def _embedding_supports(arrays: tuple[Any, ...], static: dict[str, Any]) -> str | None:
    return floats(arrays, static) if arrays[0].flags.c_contiguous else "the table is not contiguous"


def _embedding_forward(weight: Any, ids: Any, *, save: bool) -> tuple[Any, Any]:
    ids = contiguous(ids, array_namespace(ids).int64)
    rows, n = weight.shape
    y = empty(weight, (*ids.shape, n))
    blocks = row_blocks(ids.size, weight)
    cuda_launch.launch("embedding.gather", names(weight), *blocks, weight, ids, y, ids.size, rows, n)
    return y, (ids, weight)


def _embedding_vjp(g: Any, residuals: Any, needs: Any) -> tuple[Any, ...]:
    """Sort the ids, so that the rows of one are neighbors, and sum those in their order, in float32 or wider."""
    ids, weight = residuals
    xp, g = array_namespace(g), contiguous(g, weight.dtype)
    dweight = xp.zeros(weight.shape, dtype=weight.dtype)
    count, (rows, n) = ids.size, weight.shape
    if count:
        flat = xp.reshape(ids, (-1,))
        order = xp.argsort(flat, stable=True)
        ordered = xp.take(flat, order, axis=0)
        pieces = -(-count // _PIECE)
        heads, tails = (empty(g, (pieces, n), wide(g)) for _ in range(2))
        pieced, joined = (g, order, ordered, dweight, heads, tails), (ordered, heads, tails, dweight)
        sizes = count, rows, n, _PIECE
        cuda_launch.launch("embedding.scatter_pieces", names(g), *row_blocks(count, g), *pieced, *sizes)
        cuda_launch.launch("embedding.scatter_join", names(g), *row_blocks(pieces - 1, g), *joined, *sizes)
    return dweight, None


register(Kernel("cupy.embedding", "embedding", "cupy", _embedding_supports, _embedding_forward, _embedding_vjp))
