"""Activations, dropout and embedding on CuPy."""

from __future__ import annotations

from typing import Any

from xformer.backends import array_namespace, dtype_name
from xformer.kernels.cupy import launch as cuda_launch
from xformer.kernels.cupy.arrays import compute_dtype, contiguous, dtype_names, empty, supports_floats
from xformer.kernels.cupy.grid import grid_for_elements, grid_for_rows
from xformer.kernels.registry import Kernel, register

# --- add, relu, gelu and dropout -------------------------------------------------------------------------------------


def _map(kernel: str, x: Any, *arrays: Any, settings: tuple[float, ...] = ()) -> Any:
    """Launch an elementwise function of x and of more arrays, which are C-contiguous."""
    x = contiguous(x)
    y = empty(x)
    cuda_launch.launch(f"elementwise.{kernel}", dtype_names(x), *grid_for_elements(x), x, *arrays, y, x.size, *settings)
    return y


def add(x: Any, y: Any) -> Any:
    """Return x + y for C-contiguous floating arrays of one shape and dtype, else None."""
    is_supported = supports_floats((x, y), {}) is None and x.dtype == y.dtype
    return _map("add", x, y) if is_supported and x.flags.c_contiguous and y.flags.c_contiguous else None


def relu_forward(x: Any, *, save: bool) -> tuple[Any, Any]:
    """Return max(x, 0), which is also the residual."""
    y = _map("relu", x)
    return y, y


def relu_vjp(g: Any, y: Any, needs: Any) -> tuple[Any, ...]:
    """Return g where y = relu(x) is positive, else zero."""
    return (_map("relu_vjp", g, y),)


def _gelu_forward(x: Any, *, save: bool) -> tuple[Any, Any]:
    x = contiguous(x)
    return _map("gelu", x), x


def _gelu_vjp(g: Any, x: Any, needs: Any) -> tuple[Any, ...]:
    return (_map("gelu_vjp", g, x),)


def _dropout_supports(arrays: tuple[Any, ...], static: dict[str, Any]) -> str | None:
    x, mask = arrays
    if dtype_name(mask.dtype) != "bool":
        return f"mask of dtype {dtype_name(mask.dtype)} (kernels take bool)"
    return supports_floats(arrays, static) if x.shape == mask.shape else "the mask is broadcast"


def _dropout_forward(x: Any, mask: Any, *, keep_probability: float, save: bool) -> tuple[Any, Any]:
    mask = contiguous(mask)
    return _map("dropout", x, mask, settings=(1.0 / keep_probability,)), mask


def _dropout_vjp(g: Any, mask: Any, needs: Any, *, keep_probability: float) -> tuple[Any, ...]:
    return _map("dropout", g, mask, settings=(1.0 / keep_probability,)), None


register(Kernel("cupy.relu", "relu", "cupy", supports_floats, relu_forward, relu_vjp))
register(Kernel("cupy.gelu", "gelu", "cupy", supports_floats, _gelu_forward, _gelu_vjp))
register(Kernel("cupy.dropout", "dropout", "cupy", _dropout_supports, _dropout_forward, _dropout_vjp))

# --- embedding -------------------------------------------------------------------------------------------------------

_SEGMENT = 64  # sorted ids whose rows one block sums


def _embedding_supports(arrays: tuple[Any, ...], static: dict[str, Any]) -> str | None:
    return supports_floats(arrays, static) if arrays[0].flags.c_contiguous else "the weight is not contiguous"


def _embedding_forward(weight: Any, ids: Any, *, scale: float, save: bool) -> tuple[Any, Any]:
    ids = contiguous(ids, array_namespace(ids).int64)
    rows, n = weight.shape
    y = empty(weight, (*ids.shape, n))
    blocks = grid_for_rows(ids.size, weight)
    sizes = ids.size, rows, n, float(scale)
    cuda_launch.launch("embedding.gather", dtype_names(weight), *blocks, weight, ids, y, *sizes)
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
        heads, tails = (empty(g, (segments, n), compute_dtype(g)) for _ in range(2))
        sizes = count, rows, n, _SEGMENT
        arrays = g, order, sorted_ids, dweight, heads, tails
        settings = *sizes, float(scale)
        cuda_launch.launch("embedding.scatter_segments", dtype_names(g), *grid_for_rows(count, g), *arrays, *settings)
        grid = grid_for_rows(segments - 1, g)
        cuda_launch.launch("embedding.scatter_join", dtype_names(g), *grid, sorted_ids, heads, tails, dweight, *sizes)
    return dweight, None


register(Kernel("cupy.embedding", "embedding", "cupy", _embedding_supports, _embedding_forward, _embedding_vjp))
