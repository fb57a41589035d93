"""Scaled dot-product attention and multi-head attention by torch."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn

import xformer as xf
from baselines.torch_support import compiled, device_and_dtype, tensor, torch_computation
from xformer.benchmarks.computation import Computation
from xformer.benchmarks.parts import gradient_of, inputs_of, layer_fingerprint, mask_of


def build_attention(settings: dict[str, Any]) -> Computation:
    """Build scaled_dot_product_attention; settings["kernel"] is "cudnn", "flash", "mem_efficient" or "math"."""
    inputs, mask = make_tensors(settings)
    causal = settings["causal"]
    if causal and mask is not None:  # torch accepts only one of them
        mask, causal = mask & ~later(settings["length"], mask.device), False
    if "kernel" in settings:
        for kernel in ("cudnn", "flash", "mem_efficient", "math"):
            getattr(torch.backends.cuda, f"enable_{kernel}_sdp")(kernel == settings["kernel"])

    def forward(query: Any, key: Any, value: Any) -> Any:
        return nn.functional.scaled_dot_product_attention(query, key, value, mask, is_causal=causal)

    return torch_computation(forward, inputs, output_gradient(settings, inputs))


def build_layer(settings: dict[str, Any]) -> Computation:
    """Build nn.MultiheadAttention with the weights of xformer's layer.

    Inference takes its fast path unless settings["fast_path"] is False: with masks, the other path is faster on CPUs.
    """
    torch.backends.mha.set_fastpath_enabled(settings.get("fast_path", True))
    inputs, mask = make_tensors(settings)
    features, heads = settings["heads"] * settings["head_dim"], settings["heads"]
    module = nn.MultiheadAttention(features, heads, batch_first=True).train(settings["backward"])
    load_attention(module, xf.MultiHeadAttention(features, heads, init=xf.Initializer("numpy")))
    module = module.to(**device_and_dtype(settings))
    blocked = None if mask is None else ~mask[:, 0, 0, :]
    late = later(settings["length"], inputs[0].device) if settings["causal"] else None
    apply = compiled(module, settings)
    masks = {"key_padding_mask": blocked, "attn_mask": late, "is_causal": late is not None}

    def forward(x: Any) -> Any:
        return apply(x, x, x, **masks, need_weights=False)[0]

    warnings.simplefilter("ignore", UserWarning)  # the fast path uses nested tensors, which are a prototype
    return torch_computation(
        forward,
        inputs,
        output_gradient(settings, inputs),
        parameters=module.parameters(),
        fingerprint=layer_fingerprint,
    )


def make_tensors(settings: dict[str, Any]) -> tuple[list[Any], Any]:
    """Return the inputs of the workload and its mask, or None, as tensors."""
    target, mask = device_and_dtype(settings), mask_of(settings)
    inputs = inputs_of(settings, 3 if settings["part"] == "attention" else 1)
    tensors = [torch.from_numpy(x).to(**target) for x in inputs]
    return tensors, None if mask is None else torch.from_numpy(mask).to(target["device"])


def output_gradient(settings: dict[str, Any], inputs: list[Any]) -> Any:
    """Return the gradient of the output, or None for a forward pass only."""
    if not settings["backward"]:
        return None
    return torch.from_numpy(gradient_of(tuple(inputs[0].shape))).to(inputs[0])


def later(length: int, device: Any) -> Any:
    """Return a mask that is True where a key is later than the query: (length, length)."""
    return torch.ones(length, length, dtype=torch.bool, device=device).triu(1)


def load_attention(module: nn.MultiheadAttention, ours: xf.MultiHeadAttention) -> None:
    """Copy the weights of xformer's layer, which are transposed."""
    parts = [ours.query, ours.key, ours.value]
    with torch.no_grad():
        module.in_proj_weight.copy_(torch.cat([tensor(part.weight.T) for part in parts]))
        module.in_proj_bias.copy_(torch.cat([tensor(part.bias) for part in parts]))
        load_linear(module.out_proj, ours.output)


def load_linear(module: nn.Linear, ours: Any) -> None:
    """Copy the weights of xformer's linear layer, which are transposed."""
    with torch.no_grad():
        module.weight.copy_(tensor(ours.weight.T))
        if ours.bias is not None:
            module.bias.copy_(tensor(ours.bias))
