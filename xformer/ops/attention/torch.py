"""Attention by `scaled_dot_product_attention`, and its derivative by torch's flash attention for the CPU.

torch draws the dropout of its attention itself, so a call with a dropout mask runs the portable definition.
"""

from __future__ import annotations

from typing import Any

import torch

from xformer.ops._torch import FLOATS, is_differentiated_by_torch
from xformer.ops.attention.definition import causal_mask, with_repeated_heads
from xformer.ops.operation import Kernel


def _why_not(
    query: Any, key: Any, value: Any, mask: Any, bias: Any, dropout_mask: Any, *, save: bool, **options: Any
) -> str | None:
    if query.shape[-1] != value.shape[-1]:
        return "keys and values have different features"
    if 0 in query.shape or 0 in key.shape:
        return "an empty array"
    if dropout_mask is not None:
        return "a dropout mask"
    if not save:
        return None
    if bias is not None:
        return "torch has no derivative of a bias"
    if query.device.type != "cpu":
        return "the derivative is that of torch for the CPU"
    return "torch differentiates the derivative" if is_differentiated_by_torch(query, key, value) else None


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
    attn_mask, is_causal = _attn_mask(query, key, mask, bias, causal)
    if not save:
        return torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask, is_causal=is_causal, scale=scale, enable_gqa=query.shape[1] != key.shape[1]
        ), None
    if attn_mask is not None:  # the function below takes numbers, not booleans
        attn_mask = torch.zeros(attn_mask.shape, dtype=query.dtype).masked_fill_(~attn_mask, -torch.inf)
    query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
    output, logsumexp = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, is_causal, attn_mask=attn_mask, scale=scale
    )
    return output, (query, key, value, output, logsumexp, is_causal, attn_mask)


def _vjp(g: Any, residuals: Any, needs: Any, *, causal: bool, scale: float, keep_probability: float) -> tuple[Any, ...]:
    *saved, is_causal, attn_mask = residuals
    g = g if g.stride(-1) == 1 else g.contiguous()
    cotangents = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        g, *saved, 0.0, is_causal, attn_mask=attn_mask, scale=scale
    )
    return (*cotangents, None, None, None)


_differentiable_forward, _differentiable_vjp = with_repeated_heads(_forward, _vjp)


def _any_forward(*arrays: Any, save: bool, **options: Any) -> tuple[Any, Any]:
    """Let torch share the heads of keys and values itself where it can."""
    return (_differentiable_forward if save else _forward)(*arrays, save=save, **options)


KERNELS = [
    Kernel("torch.attention", "attention", "torch", _any_forward, _differentiable_vjp, dtypes=FLOATS, why_not=_why_not)
]
