"""torch's Transformer modules with the weights of xformer's models."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from workloads import stacks
from workloads.small_model import fingerprint, make_ids

import xformer as xf
from baselines.torch_attention import later, load_attention, load_linear
from baselines.torch_support import compiled, device_and_dtype, tensor, torch_computation
from xformer.benchmarks.computation import Computation

_MAX_LENGTH = 512


def build_encoder(settings: dict[str, Any]) -> Computation:
    """Build nn.TransformerEncoder; inference takes its fast path."""
    d_model, heads = settings["heads"] * settings["head_dim"], settings["heads"]
    layer = nn.TransformerEncoderLayer(d_model, heads, 4 * d_model, dropout=0.0, batch_first=True)
    module = nn.TransformerEncoder(layer, settings["layers"]).eval()
    for theirs, ours in zip(module.layers, stacks.encoder_layers(settings, "numpy"), strict=True):
        load_layer(theirs, ours)
    x = torch.from_numpy(stacks.features(settings)).to(**device_and_dtype(settings))
    return torch_computation(compiled(module.to(**device_and_dtype(settings)), settings), [x])


def build_model(settings: dict[str, Any]) -> Computation:
    """Build the forward pass of a whole model, or its loss and gradient."""
    model = Translator(xf.Transformer(stacks.config(settings), xp="numpy", seed=0)).eval()
    parameters = list(model.parameters())
    metadata = {"parameters": sum(parameter.numel() for parameter in parameters)}
    arrays = list(map(tensor, make_ids(settings)))
    if not settings.get("gradient"):
        return torch_computation(compiled(model, settings), arrays, metadata=metadata)

    def loss_of(source: Any, target: Any, labels: Any) -> Any:
        logits = model(source, target).flatten(0, 1)
        return nn.functional.cross_entropy(logits, labels.flatten(), ignore_index=0, reduction="none").mean()

    forward = compiled(loss_of, settings)

    def step(index: int) -> tuple[Any, ...]:
        loss = forward(*arrays)
        return (loss.detach(), *torch.autograd.grad(loss, parameters))

    return Computation(step, fingerprint, metadata)


class Translator(nn.Module):
    """A pre-norm nn.Transformer with embeddings and output layer and the weights of xformer's Transformer."""

    def __init__(self, ours: xf.Transformer) -> None:
        super().__init__()
        config = ours.config
        d_model, rate = config.d_model, config.dropout
        self.source = nn.Embedding.from_pretrained(tensor(ours.source_embedding.weight), freeze=False)
        self.target = self.source
        if ours.target_embedding is not None:
            self.target = nn.Embedding.from_pretrained(tensor(ours.target_embedding.weight), freeze=False)
        layers = config.num_encoder_layers, config.num_decoder_layers
        self.layers = nn.Transformer(
            d_model, config.num_heads, *layers, config.d_ff, rate, batch_first=True, norm_first=True
        )
        for layer in (*self.layers.encoder.layers, *self.layers.decoder.layers):
            set_dropout(layer, config)
        load_stack(self.layers.encoder, ours.encoder, ours.encoder_norm)
        load_stack(self.layers.decoder, ours.decoder, ours.decoder_norm)
        self.output = nn.Linear(d_model, config.target_vocab_size, bias=False)
        if ours.output is None:
            self.output.weight = self.target.weight
        else:
            load_linear(self.output, ours.output)
        angle = torch.arange(_MAX_LENGTH)[:, None] / 10000.0 ** (torch.arange(0, d_model, 2) / d_model)
        self.register_buffer("positions", torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(1))
        self.dropout = nn.Dropout(rate)

    def embed(self, table: nn.Embedding, ids: Any) -> Any:
        """Return token embeddings with positions: (batch, length, d_model)."""
        return self.dropout(table(ids) * math.sqrt(table.embedding_dim) + self.positions[: ids.shape[1]])

    def forward(self, source: Any, target: Any) -> Any:
        """Return logits: (batch, target length, vocabulary)."""
        features = self.layers(
            self.embed(self.source, source),
            self.embed(self.target, target),
            tgt_mask=later(target.shape[1], target.device),
            tgt_is_causal=True,  # otherwise torch compares the mask on the host, which breaks the graph
            src_key_padding_mask=source == 0,
            tgt_key_padding_mask=target == 0,
            memory_key_padding_mask=source == 0,
        )
        return self.output(features)


def set_dropout(layer: Any, config: xf.TransformerConfig) -> None:
    """Set the dropout of activations and attention weights, which torch enables by default, to that of xformer."""
    layer.dropout.p = config.activation_dropout
    layer.self_attn.dropout = config.attention_dropout
    if hasattr(layer, "multihead_attn"):
        layer.multihead_attn.dropout = config.attention_dropout


def load_stack(stack: Any, ours: Any, norm: Any) -> None:
    """Copy the weights of a stack of layers and of its final norm."""
    for theirs, layer in zip(stack.layers, ours, strict=True):
        load_layer(theirs, layer)
    load_norm(stack.norm, norm)


def load_layer(theirs: Any, ours: Any) -> None:
    """Copy the weights of an encoder or decoder layer."""
    load_attention(theirs.self_attn, ours.self_attention)
    residuals = [ours.self_attention_residual, ours.feed_forward_residual]
    if hasattr(theirs, "multihead_attn"):
        load_attention(theirs.multihead_attn, ours.cross_attention)
        residuals.insert(1, ours.cross_attention_residual)
    load_linear(theirs.linear1, ours.feed_forward.up)
    load_linear(theirs.linear2, ours.feed_forward.down)
    for index, residual in enumerate(residuals, start=1):
        load_norm(getattr(theirs, f"norm{index}"), residual.norm)


def load_norm(theirs: Any, ours: Any) -> None:
    """Copy the weights of a layer norm."""
    with torch.no_grad():
        theirs.weight.copy_(tensor(ours.weight))
        theirs.bias.copy_(tensor(ours.bias))
