"""Attention on CuPy by batched products, for calls that the cuDNN kernel does not support.

For float16 and bfloat16, scores and softmax are float32, and the weights have the dtype of the arrays. Memory grows
with queries times keys.
"""

from __future__ import annotations

from typing import Any

from xformer.backends import NativeArray as Array
from xformer.backends import accumulation_dtype, array_namespace, device
from xformer.kernels.cupy.cublas import batched_product
from xformer.kernels.cupy.launch import FLOATS, why_not
from xformer.ops.attention import causal_mask, repeat_kv, sum_kv_groups
from xformer.ops.dropout import apply_dropout
from xformer.ops.operation import Kernel
from xformer.ops.softmax import softmax, softmax_cotangent


def forward(*arrays: Any, causal: bool, scale: float, keep_probability: float, save: bool) -> tuple[Array, Any]:
    """Return the output (..., queries, value_dim), and the arrays, weights and dropout mask as residuals."""
    query, key, value, mask, bias, dropout_mask = arrays
    xp, heads = array_namespace(query), key.shape[1]
    key, value = repeat_kv(key, query), repeat_kv(value, query)
    scores = batched_product(query, _transpose(key), alpha=scale, dtype=accumulation_dtype(xp, query.dtype))
    if bias is not None:
        scores += xp.astype(bias, scores.dtype, copy=False)
    if causal and query.shape[-2] > 1:  # a single query is the last one, and sees every key
        allowed = causal_mask(xp, query.shape[-2], key.shape[-2], device(query))
        mask = allowed if mask is None else xp.logical_and(mask, allowed)
    weights = xp.astype(softmax(scores, mask), query.dtype, copy=False)
    dropped = weights if dropout_mask is None else apply_dropout(weights, dropout_mask, keep_probability)
    return batched_product(dropped, value), (query, key, value, weights, dropout_mask, heads) if save else None


def vjp(g: Array, residuals: Any, needs: Any, *, causal: bool, scale: float, keep_probability: float) -> Any:
    """Compute the cotangents that are needed, as the definition does, with dS in float32 until it is multiplied."""
    query, key, value, weights, dropout_mask, heads = residuals
    xp = array_namespace(g)
    dquery = dkey = dvalue = dbias = None
    if needs[2]:
        dropped = weights if dropout_mask is None else apply_dropout(weights, dropout_mask, keep_probability)
        dvalue = batched_product(_transpose(dropped), g)
    if needs[0] or needs[1] or needs[4]:
        dtype = accumulation_dtype(xp, weights.dtype)
        dweights = batched_product(g, _transpose(value), dtype=dtype)
        if dropout_mask is not None:
            dweights = apply_dropout(dweights, dropout_mask, keep_probability)
        dbias = softmax_cotangent(dweights, xp.astype(weights, dtype, copy=False))
        dscores = xp.astype(dbias, weights.dtype, copy=False)
        dquery = batched_product(dscores, key, alpha=scale) if needs[0] else None
        dkey = batched_product(_transpose(dscores), query, alpha=scale) if needs[1] else None
    dkey, dvalue = (None if x is None else sum_kv_groups(x, heads) for x in (dkey, dvalue))
    return dquery, dkey, dvalue, None, dbias if needs[4] else None, None


def _transpose(x: Array) -> Array:
    return array_namespace(x).matrix_transpose(x)


KERNELS = [Kernel("cupy.attention", "attention", "cupy", forward, vjp, dtypes=FLOATS, why_not=why_not, tolerance=2e-2)]
