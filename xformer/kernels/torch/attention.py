"""Attention by `scaled_dot_product_attention`, and its derivative by torch's flash attention for the CPU."""

from __future__ import annotations

from typing import Any

import torch

from xformer.kernels.registry import OPERATIONS, Kernel, register
from xformer.kernels.torch.arrays import is_differentiated_by_torch, supports_floats
from xformer.ops.attention import causal_mask

_portable = OPERATIONS["attention"].portable


def _supports(arrays: tuple[Any, ...], static: dict[str, Any]) -> str | None:
    query, key, value, _, _, dropout_mask = arrays
    if query.ndim != 4 or key.ndim != 4 or value.ndim != 4:
        return "not (batch, heads, length, features)"
    if query.shape[:2] != key.shape[:2]:
        return "batch or heads are broadcast"
    if query.shape[-1] != value.shape[-1]:
        return "keys and values have different features"
    if 0 in query.shape or key.shape[2] == 0:
        return "an empty array"
    if dropout_mask is not None:
        return "a dropout mask"
    return supports_floats(arrays, static)


def _attn_mask(query: Any, key: Any, mask: Any, bias: Any, causal: bool) -> tuple[Any, bool]:
    """Return the mask or bias of torch's function, 4D or None, and whether it masks later keys itself.

    torch aligns its causal mask top-left; for as many queries as keys that is the same as bottom-right.
    """
    queries, keys = query.shape[2], key.shape[2]
    if mask is not None and mask.ndim > 2 and queries > 1 and mask.shape[-2] == 1 and keys == 1:
        mask = mask.expand(*mask.shape[:-2], queries, keys)
    if causal and queries > 1:
        if mask is None and bias is None and queries == keys:
            return None, True
        visible = causal_mask(torch, queries, keys, query.device)
        mask = visible if mask is None else mask & visible
    if bias is not None:
        mask = bias if mask is None else torch.where(mask, bias, -torch.inf)
    return (None if mask is None else mask.reshape((1,) * (4 - mask.ndim) + mask.shape)), False


def _forward(
    query: Any,
    key: Any,
    value: Any,
    mask: Any,
    bias: Any,
    dropout_mask: Any,
    *,
    causal: bool,
    scale: float,
    keep_probability: float,
    save: bool,
) -> tuple[Any, Any]:
    arrays = query, key, value, mask, bias
    # torch's backward function returns no cotangent of a bias, and torch cannot differentiate it again.
    if save and (bias is not None or query.device.type != "cpu" or is_differentiated_by_torch(*arrays)):
        static: Any = {"causal": causal, "scale": scale, "keep_probability": keep_probability}
        output, residuals = _portable.forward(*arrays, dropout_mask, **static, save=save)
        return output, (_portable.vjp, residuals)
    attn_mask, is_causal = _attn_mask(*arrays[:2], mask, bias, causal)
    if not save:
        return torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask, is_causal=is_causal, scale=scale
        ), None
    if attn_mask is not None:  # the function below takes numbers, not booleans
        attn_mask = torch.zeros(attn_mask.shape, dtype=query.dtype).masked_fill_(~attn_mask, -torch.inf)
    query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
    output, logsumexp = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, is_causal, attn_mask=attn_mask, scale=scale
    )
    return output, (_flash_vjp, (query, key, value, output, logsumexp, is_causal, attn_mask))


def _vjp(g: Any, residuals: Any, needs: Any, **static: Any) -> tuple[Any, ...]:
    vjp, saved = residuals
    return vjp(g, saved, needs, **static)


def _flash_vjp(
    g: Any, residuals: Any, needs: Any, *, causal: bool, scale: float, keep_probability: float
) -> tuple[Any, ...]:
    *saved, is_causal, attn_mask = residuals
    g = g if g.stride(-1) == 1 else g.contiguous()
    cotangents = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        g, *saved, 0.0, is_causal, attn_mask=attn_mask, scale=scale
    )
    return (*cotangents, None, None, None)


register(Kernel("torch.attention", "attention", "torch", _supports, _forward, _vjp))
