"""Kernels for torch.

They are the library's own fused functions. Outside our own differentiation (`save=False`) they are public
functions, which torch differentiates and compiles. Inside it, they are the pairs of forward and backward functions that
torch's autograd itself calls, because arrays do not require grad there, and inference mode has no autograd. A kernel
does not write to its inputs, except for Adam's.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from xformer.backends import array_namespace
from xformer.ops.activations import QUICK
from xformer.ops.attention import causal_mask, with_repeated_heads
from xformer.ops.experts import experts_vjp, sliced_forward
from xformer.ops.linear import affine_functions, as_rows
from xformer.ops.operation import Kernel
from xformer.ops.optimizers import Settings, slots, squared_norm_vjp, updated, writable

FLOATS = ("float16", "bfloat16", "float32", "float64")
WIDE_FLOATS = ("float32", "float64")


def is_differentiated_by_torch(*arrays: Any) -> bool:
    """Return whether torch's autograd records operations on the arrays."""
    return torch.is_grad_enabled() and any(array is not None and array.requires_grad for array in arrays)


# --- activations ------------------------------------------------------------------------------------------------------

_aten, _functional = torch.ops.aten, torch.nn.functional


def _relu_forward(x: Any, *, save: bool) -> tuple[Any, Any]:
    y = torch.relu(x)
    return y, y


_MAX_ABS = 40.0  # beyond, the tail of the normal distribution is zero; infinity times zero would be NaN


def _gelu_forward(x: Any, *, save: bool) -> tuple[Any, Any]:
    clamped = x.clamp(min=-_MAX_ABS)
    return _functional.gelu(clamped), clamped


# --- adam -------------------------------------------------------------------------------------------------------------

_NO_BIAS_CORRECTION = 1e9  # steps, after which torch's own bias correction is 1


def _adam_why_not(grad_scale: Any, *slot_arrays: Any, settings: Any = (), **options: Any) -> str | None:
    if not all(isinstance(number, float) for number in settings):
        return "settings are arrays"
    for index, array in enumerate(slot_arrays):
        if index % 4 != 1 and not array.is_contiguous():
            return "an array is not contiguous"
    if len({array.device for array in slot_arrays}) > 1:
        return "arrays on several devices"
    return "torch differentiates the update" if is_differentiated_by_torch(*slot_arrays) else None


def _adam_forward(
    grad_scale: Any, *arrays: Any, settings: Settings, weight_decay: Sequence[float], donate: bool, save: bool
) -> tuple[Any, Any]:
    """Update with torch's fused AdamW, moving the bias correction c of the second moment out of the root.

    a m / (sqrt(c v) + e) = a/sqrt(c) m / (sqrt(v) + e/sqrt(c))
    """
    arrays = tuple(writable(arrays, donate))
    step_size, beta1, beta2, bias_correction2, epsilon, learning_rate = settings
    root, skip = math.sqrt(bias_correction2), None
    # torch multiplies the decay by its learning rate, which contains both bias corrections.
    bias_correction1 = learning_rate / step_size if step_size else 0.0
    scale, device = grad_scale, arrays[0].device
    if grad_scale is not None and device.type == "cpu":  # reading a value on the CPU needs no synchronization
        scale = float(grad_scale)
        if math.isnan(scale):
            return updated(arrays), None
    elif grad_scale is not None:
        skip = torch.isnan(grad_scale).to(torch.float32)
    options: dict[str, Any] = {"lr": step_size / root, "beta1": beta1, "beta2": beta2, "eps": epsilon / root}
    options |= {"amsgrad": False, "maximize": False}
    steps = torch.full((), _NO_BIAS_CORRECTION, dtype=torch.float32, device=device)
    by_decay = sorted(zip(weight_decay, slots(arrays), strict=True), key=lambda pair: pair[0])
    for rate, group in itertools.groupby(by_decay, key=lambda pair: pair[0]):
        parameters, gradients, exp_avgs, exp_avg_sqs = map(list, zip(*(slot for _, slot in group), strict=True))
        if scale is not None and (skip is not None or scale != 1.0):
            gradients = [gradient * scale for gradient in gradients]
        gradients, decay = [gradient.contiguous() for gradient in gradients], rate * bias_correction1 * root
        state: tuple[Any, ...] = parameters, gradients, exp_avgs, exp_avg_sqs, [], [steps] * len(parameters)
        torch._fused_adamw_(*state, weight_decay=decay, found_inf=skip, **options)
    return updated(arrays), None


# --- attention --------------------------------------------------------------------------------------------------------
# Attention by `scaled_dot_product_attention`, and its derivative by torch's flash attention for the CPU.
#
# torch draws the dropout of its attention itself, so a call with a dropout mask runs the portable definition.


def _attention_why_not(
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


def _attention_forward(*arrays: Any, causal: bool, scale: float, save: bool, **options: Any) -> tuple[Any, Any]:
    query, key, value, mask, bias, _ = arrays
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


def _attention_vjp(g: Any, residuals: Any, needs: Any, *, scale: float, **options: Any) -> tuple[Any, ...]:
    *saved, is_causal, attn_mask = residuals
    g = g if g.stride(-1) == 1 else g.contiguous()
    cotangents = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        g, *saved, 0.0, is_causal, attn_mask=attn_mask, scale=scale
    )
    return (*cotangents, None, None, None)


_differentiable_forward, _differentiable_vjp = with_repeated_heads(_attention_forward, _attention_vjp)


def _any_forward(*arrays: Any, save: bool, **options: Any) -> tuple[Any, Any]:
    """Let torch share the heads of keys and values itself where it can."""
    return (_differentiable_forward if save else _attention_forward)(*arrays, save=save, **options)


# --- cross_entropy ----------------------------------------------------------------------------------------------------


def _cross_entropy_forward(
    logits: Any, labels: Any, *, pad_id: int, label_smoothing: float, z_loss: float, save: bool
) -> tuple[Any, Any]:
    rows, labels_flat = as_rows(logits), labels.reshape(-1)
    is_token = labels_flat != pad_id
    log_probs = torch.log_softmax(rows, -1, dtype=torch.promote_types(rows.dtype, torch.float32))
    losses = log_probs.gather(-1, labels_flat[:, None])[:, 0] * (label_smoothing - 1.0)
    if label_smoothing:
        losses = losses - label_smoothing * log_probs.mean(-1)
    log_z = None
    if z_loss:
        log_z = torch.logsumexp(rows.to(log_probs.dtype), -1)
        losses = losses + z_loss * log_z * log_z
    losses = losses.masked_fill(~is_token, 0.0).view(labels.shape)  # not a product: a padded row may hold infinities
    return losses, (log_probs, log_z, labels_flat, is_token, logits.shape)


def _cross_entropy_vjp(
    g: Any, residuals: Any, needs: Any, *, pad_id: int, label_smoothing: float, z_loss: float
) -> tuple[Any, ...]:
    """Compute dlogits = g (p - q + 2 z log(Z) p), with q the smoothed target distribution, Z the partition function."""
    log_probs, log_z, labels, is_token, shape = residuals
    g = g.reshape(-1).masked_fill(~is_token, 0.0)[:, None]
    dlogits = log_probs.exp() * (g if log_z is None else g * (1.0 + 2.0 * z_loss * log_z[:, None]))
    if label_smoothing:
        dlogits -= g * (label_smoothing / shape[-1])
    return dlogits.scatter_add_(1, labels[:, None], g * (label_smoothing - 1.0)).view(shape), None


# --- dropout ----------------------------------------------------------------------------------------------------------


def _dropout_forward(x: Any, mask: Any, *, keep_probability: float, save: bool) -> tuple[Any, Any]:
    return (x * (1.0 / keep_probability)).masked_fill(~mask, 0.0), mask


def _dropout_vjp(g: Any, mask: Any, needs: Any, *, keep_probability: float) -> tuple[Any, ...]:
    return _dropout_forward(g, mask, keep_probability=keep_probability, save=False)[0], None


# --- embedding --------------------------------------------------------------------------------------------------------


def _embedding_forward(weight: Any, ids: Any, *, scale: float, save: bool) -> tuple[Any, Any]:
    y = torch.nn.functional.embedding(ids, weight)
    return (y if scale == 1.0 else y * scale), (ids, len(weight))


def _embedding_vjp(g: Any, residuals: Any, needs: Any, *, scale: float) -> tuple[Any, ...]:
    ids, vocabulary = residuals
    g = g if scale == 1.0 else g * scale
    return torch.ops.aten.embedding_dense_backward(g, ids, vocabulary, -1, False), None


def _embedding_why_not(weight: Any, ids: Any, **options: Any) -> str | None:
    return None if ids.dtype in (torch.int32, torch.int64) else f"ids of dtype {ids.dtype}"


# --- experts ----------------------------------------------------------------------------------------------------------


def _expert_why_not(x: Any, expert_indices: Any, *arrays: Any, **options: Any) -> str | None:
    is_readable = array_namespace(expert_indices).is_host_accessible(expert_indices)
    return None if is_readable else "expert_indices cannot be read, or only after a wait"


# --- linear -----------------------------------------------------------------------------------------------------------


def _affine(rows: Any, weight: Any, bias: Any, relu: bool) -> Any:
    y = rows @ weight if bias is None else torch.addmm(bias, rows, weight)
    return y.relu_() if relu else y


def _relu_vjp(g: Any, y: Any, needs: Any) -> tuple[Any, ...]:
    return (_aten.threshold_backward(g, y, 0.0),)


def _product(rows: Any, weight: Any, addend: Any) -> Any:
    return rows @ weight.mT if addend is None else torch.addmm(addend, rows, weight.mT)


def _parameter_cotangents(rows: Any, g_rows: Any, weight: Any, needs: Any) -> tuple[Any, Any]:
    """Return the gradient of a transposed view (the tied output layer) in the memory order of the view."""
    dweight = None
    if needs[0]:
        dweight = (g_rows.mT @ rows).mT if weight.stride(0) == 1 else rows.mT @ g_rows
    wide = torch.promote_types(g_rows.dtype, torch.float32)
    return dweight, (g_rows.sum(0, dtype=wide) if needs[1] else None)


_AFFINE = affine_functions(_affine, _product, _parameter_cotangents, _relu_vjp)


# --- norms ------------------------------------------------------------------------------------------------------------


def _layer_norm_forward(x: Any, weight: Any, bias: Any, *, epsilon: float, save: bool) -> tuple[Any, Any]:
    if not save:
        return torch.nn.functional.layer_norm(x, weight.shape, weight, bias, epsilon), None
    y, mean, inverse = torch.native_layer_norm(x, weight.shape, weight, bias, epsilon)
    return y, (x, mean, inverse, weight, bias)


def _layer_norm_vjp(g: Any, residuals: Any, needs: Any, *, epsilon: float) -> tuple[Any, ...]:
    x, mean, inverse, weight, bias = residuals
    return torch.ops.aten.native_layer_norm_backward(g, x, weight.shape, mean, inverse, weight, bias, needs)


def _rms_norm_forward(x: Any, weight: Any, *, epsilon: float, save: bool) -> tuple[Any, Any]:
    return torch.nn.functional.rms_norm(x, weight.shape, weight, epsilon), None


def _norm_why_not(*arrays: Any, save: bool, **options: Any) -> str | None:
    return "torch has its derivative for some devices only" if save else None


# The definition scales rows of float16 and bfloat16, so that their squares do not overflow.


# --- squared_norm -----------------------------------------------------------------------------------------------------


def _squared_norm_forward(*arrays: Any, save: bool) -> tuple[Any, Any]:
    return torch.stack([torch.linalg.vector_norm(x) for x in arrays]).square().sum(), arrays


# --- registration -----------------------------------------------------------------------------------------------------


def _kernel(operation: str, forward: Any, vjp: Any, why_not: Any = None, dtypes: Any = FLOATS) -> Kernel:
    return Kernel(f"torch.{operation}", operation, "torch", forward, vjp, dtypes, why_not)


def _activation(operation: str, forward: Callable[..., Any], backward: Callable[[Any, Any], Any]) -> Kernel:
    return _kernel(operation, forward, lambda g, x, needs: (backward(g, x),))


KERNELS = [
    _kernel("relu", _relu_forward, _relu_vjp),
    _activation("silu", lambda x, *, save: (_functional.silu(x), x), _aten.silu_backward),
    _activation(
        "quick_gelu",
        lambda x, *, save: (_functional.silu(QUICK * x) * (1.0 / QUICK), x),
        lambda g, x: _aten.silu_backward(g, QUICK * x),
    ),
    _activation("gelu", _gelu_forward, lambda g, x: _aten.gelu_backward(g, x.clamp(max=_MAX_ABS))),
    _activation(
        "gelu_tanh",
        lambda x, *, save: (_functional.gelu(x, approximate="tanh"), x),
        functools.partial(_aten.gelu_backward, approximate="tanh"),
    ),
    _kernel("adam", _adam_forward, None, _adam_why_not, WIDE_FLOATS),
    _kernel("attention", _any_forward, _differentiable_vjp, _attention_why_not),
    _kernel("cross_entropy", _cross_entropy_forward, _cross_entropy_vjp),
    _kernel("dropout", _dropout_forward, _dropout_vjp, dtypes=None),
    _kernel("embedding", _embedding_forward, _embedding_vjp, _embedding_why_not, WIDE_FLOATS),
    _kernel("experts", sliced_forward, experts_vjp, _expert_why_not, None),
    *[_kernel(name, *_AFFINE) for name in ("linear", "project_heads")],
    _kernel("layer_norm", _layer_norm_forward, _layer_norm_vjp, dtypes=WIDE_FLOATS),
    _kernel("rms_norm", _rms_norm_forward, None, _norm_why_not, WIDE_FLOATS),
    _kernel("squared_norm", _squared_norm_forward, squared_norm_vjp, dtypes=WIDE_FLOATS),
]
