"""Attention by torch: its fused core, and its layer."""

from __future__ import annotations

import contextlib
import warnings
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import xformer as xf
from peers.torch_support import position_terms, tensor, torch_work
from xformer.benchmarks import Work
from xformer.benchmarks.attention import ends, inputs


def core(settings: dict[str, Any]) -> Work:
    """torch.nn.functional.scaled_dot_product_attention; settings["kernel"], a name of SDPBackend, forces one."""
    given = tensors(settings)
    causal, mask = settings["causal"], given["mask"]
    if causal and mask is not None:  # it takes one or the other
        mask, causal = mask & ~later(settings["length"]).to(mask.device), False
    kernel = settings.get("kernel")

    def forward(query: Any, key: Any, value: Any) -> Any:
        forced = contextlib.nullcontext() if kernel is None else sdpa_kernel(getattr(SDPBackend, kernel))
        with forced:
            return nn.functional.scaled_dot_product_attention(query, key, value, mask, is_causal=causal)

    return torch_work(forward, [given[name] for name in ("query", "key", "value")], gradient(settings, given))


def layer(settings: dict[str, Any]) -> Work:
    """nn.MultiheadAttention with the weights of ours; in inference it takes its fast path."""
    given = tensors(settings)
    features, heads = settings["heads"] * settings["head_dim"], settings["heads"]
    module = nn.MultiheadAttention(features, heads, batch_first=True).train(settings["backward"])
    load_attention(module, xf.MultiHeadAttention(features, heads, init=xf.Initializer("numpy")))
    module = module.to(**position_terms(settings))
    blocked = None if given["mask"] is None else ~given["mask"][:, 0, 0, :]
    late = later(settings["length"]).to(given["x"].device) if settings["causal"] else None
    apply = torch.compile(module) if settings.get("compiled") else module

    masks = {"key_padding_mask": blocked, "attn_mask": late, "is_causal": late is not None}

    def forward(x: Any) -> Any:
        return apply(x, x, x, **masks, need_weights=False)[0]

    warnings.simplefilter("ignore", UserWarning)  # the fast path makes nested tensors, which are a prototype
    return torch_work(forward, [given["x"]], gradient(settings, given), parameters=module.parameters(), digest=ends)


def tensors(settings: dict[str, Any]) -> dict[str, Any]:
    """The inputs of the case."""
    place = position_terms(settings)
    found = {name: None if x is None else torch.from_numpy(x) for name, x in inputs(settings).items()}
    return {
        name: x if x is None else x.to(place["device"]) if x.dtype == torch.bool else x.to(**place)
        for name, x in found.items()
    }


def gradient(settings: dict[str, Any], given: dict[str, Any]) -> Any:
    """The gradient of the output, or None for a forward pass alone."""
    return given["gradient"] if settings["backward"] else None


def later(length: int) -> Any:
    """True where a key is later than the query: (length, length)."""
    return torch.ones(length, length, dtype=torch.bool).triu(1)


def load_attention(module: nn.MultiheadAttention, ours: xf.MultiHeadAttention) -> None:
    """Give torch's layer the weights of ours, which are stored the other way round."""
    parts = [ours.query, ours.key, ours.value]
    with torch.no_grad():
        module.in_proj_weight.copy_(torch.cat([tensor(part.weight.T) for part in parts]))
        module.in_proj_bias.copy_(torch.cat([tensor(part.bias) for part in parts]))
        load_linear(module.out_proj, ours.output)


def load_linear(module: nn.Linear, ours: Any) -> None:
    """Give torch's linear layer the weights of ours."""
    with torch.no_grad():
        module.weight.copy_(tensor(ours.weight.T))
        if ours.bias is not None:
            module.bias.copy_(tensor(ours.bias))
