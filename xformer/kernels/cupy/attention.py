"""Attention on CuPy by batched products, with the scores in memory: for what the fused kernel leaves out.

Scores and their softmax are float32 for float16 and bfloat16; weights are kept, and multiplied, in the dtype of the
arrays. Memory grows with queries times keys.
"""

from __future__ import annotations

from typing import Any

from xformer.backends import Array, accumulation_dtype, array_namespace, device, dtype_name
from xformer.kernels.cupy.cublas import batched_product
from xformer.kernels.registry import Kernel, register
from xformer.ops.attention import causal_mask, repeat_kv, sum_kv_groups
from xformer.ops.dropout import apply_keep
from xformer.ops.softmax import softmax, softmax_cotangent

_DTYPES = ("float16", "bfloat16", "float32", "float64")


def mixed(arrays: tuple[Any, ...], dtypes: tuple[str, ...]) -> str | None:
    """None where query, key, value and bias, those that there are, have one dtype out of `dtypes`, else the reason."""
    query, key, value, _, bias, _ = arrays
    found = {dtype_name(array.dtype) for array in (query, key, value, bias) if array is not None}
    if len(found) > 1:
        return f"dtypes {' and '.join(sorted(found))} are mixed"
    return None if found <= {*dtypes} else f"dtype {found.pop()} (made for {', '.join(dtypes)})"


def supports(arrays: tuple[Any, ...], static: dict[str, Any]) -> str | None:
    """None for floating arrays of one dtype, in which batch and heads may be broadcast, else the reason why not."""
    return mixed(arrays, _DTYPES)


def forward(
    query: Array,
    key: Array,
    value: Array,
    mask: Array | None,
    bias: Array | None,
    keep: Array | None,
    *,
    causal: bool,
    scale: float,
    keep_probability: float,
    save: bool,
) -> tuple[Array, Any]:
    """The output (..., queries, value_dim); kept are the arrays, the weights and the mask of dropout."""
    xp, heads = array_namespace(query), key.shape[-3] if len(key.shape) > 2 else 1
    query, key, value = _together(xp, query, repeat_kv(key, query), repeat_kv(value, query))
    scores = batched_product(query, _turned(key), alpha=scale, dtype=accumulation_dtype(xp, query.dtype))
    if bias is not None:
        scores += xp.astype(bias, scores.dtype, copy=False)
    if causal and query.shape[-2] > 1:  # a single query is the last one, and sees every key
        allowed = causal_mask(xp, query.shape[-2], key.shape[-2], device(query))
        mask = allowed if mask is None else xp.logical_and(mask, allowed)
    weights = xp.astype(softmax(scores, mask), query.dtype, copy=False)
    dropped = weights if keep is None else apply_keep(weights, keep, keep_probability)
    return batched_product(dropped, value), (query, key, value, weights, keep, heads) if save else None


def vjp(g: Array, residuals: Any, needs: Any, *, causal: bool, scale: float, keep_probability: float) -> Any:
    """As in ops/attention.py, with dS in float32 until it is multiplied; only what is needed."""
    query, key, value, weights, keep, heads = residuals
    xp = array_namespace(g)
    dquery = dkey = dvalue = dbias = None
    if needs[2]:
        dropped = weights if keep is None else apply_keep(weights, keep, keep_probability)
        dvalue = batched_product(_turned(dropped), g)
    if needs[0] or needs[1] or needs[4]:
        wide = accumulation_dtype(xp, weights.dtype)
        dweights = batched_product(g, _turned(value), dtype=wide)
        if keep is not None:
            dweights = apply_keep(dweights, keep, keep_probability)
        dbias = softmax_cotangent(dweights, xp.astype(weights, wide, copy=False))
        dscores = xp.astype(dbias, weights.dtype, copy=False)
        dquery = batched_product(dscores, key, alpha=scale) if needs[0] else None
        dkey = batched_product(_turned(dscores), query, alpha=scale) if needs[1] else None
    dkey, dvalue = (None if x is None else sum_kv_groups(x, heads) for x in (dkey, dvalue))
    return dquery, dkey, dvalue, None, dbias if needs[4] else None, None


def _turned(x: Array) -> Array:
    return array_namespace(x).matrix_transpose(x)


def _together(xp: Any, *arrays: Array) -> list[Array]:
    """The same batch and heads in all arrays (their cotangents are summed where they are used, as after any op)."""
    shapes = [tuple(array.shape[:-2]) for array in arrays]
    if shapes.count(shapes[0]) == len(shapes):
        return list(arrays)
    batch = tuple(max(sizes) if min(sizes) else 0 for sizes in zip(*shapes, strict=True))
    return [xp.broadcast_to(array, (*batch, *array.shape[-2:])) for array in arrays]


for _operation in ("attention", "grouped_attention"):
    register(Kernel(f"cupy.{_operation}", _operation, "cupy", supports, forward, vjp, tolerance=2e-2))
