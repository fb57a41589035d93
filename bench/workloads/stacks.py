"""Models: an encoder stack, and the parts shared by the training and decoding benchmarks."""

from __future__ import annotations

from typing import Any

import numpy as np

from xformer import jit
from xformer.benchmarks.computation import Backend, Computation
from xformer.benchmarks.interleaved import Workload, name_with_dtype
from xformer.layers import EncoderLayer, Initializer
from xformer.layers.weights import pack
from xformer.models import TransformerConfig
from xformer.models.base import LayerFactory

FIRST_ID = 4  # smaller ids are padding, start, end and unknown tokens


def encoder_workload(settings: dict[str, Any]) -> Workload:
    """Return the workload of an encoder stack.

    Args:
        settings: batch, length, heads, head_dim, layers; d_model is heads * head_dim, d_ff is 4 * d_model.
    """
    d_model, tokens = settings["heads"] * settings["head_dim"], settings["batch"] * settings["length"]
    name = f"encoder {settings['batch']}x{settings['length']}, {settings['layers']} layers, d_model {d_model}, forward"
    flops = tokens * settings["layers"] * layer_flops(d_model, 4 * d_model, settings["length"])
    return Workload(name_with_dtype(name, settings), settings, (tokens,), flops)


def layer_flops(d_model: int, d_ff: int, keys: int) -> int:
    """Count the operations of an encoder layer per token: projections, feed-forward, attention scores and averages."""
    return 8 * d_model**2 + 4 * d_model * d_ff + 4 * d_model * keys


def model_flops(config: TransformerConfig, tokens: int, length: int) -> int:
    """Count the operations of a forward pass: `tokens` on both sides, in sentences of one length."""
    d_model = config.d_model
    layer = layer_flops(d_model, config.d_ff, length)
    causal, cross = 4 * d_model * (length // 2), 8 * d_model**2 + 4 * d_model * length
    decoder = config.num_decoder_layers * (layer - causal + cross) + 2 * d_model * config.target_vocab_size
    return tokens * (config.num_encoder_layers * layer + decoder)


def config(settings: dict[str, Any], **changes: Any) -> TransformerConfig:
    """Return the configuration of a model of these sizes with one shared embedding and no dropout."""
    d_model, size = settings["heads"] * settings["head_dim"], settings["vocabulary"]
    values: dict[str, Any] = {
        "source_vocab_size": size,
        "target_vocab_size": size,
        "d_model": d_model,
        "num_heads": settings["heads"],
        "d_ff": 4 * d_model,
        "num_encoder_layers": settings["layers"],
        "num_decoder_layers": settings["layers"],
        "dropout": 0.0,
        "share_embeddings": True,
    }
    return TransformerConfig(**{**values, **changes})


def sentences(batch: int, length: int, vocabulary: int, *, seed: int = 0) -> list[list[int]]:
    """Return random token ids."""
    sentences: list[list[int]] = np.random.default_rng(seed).integers(FIRST_ID, vocabulary, (batch, length)).tolist()
    return sentences


def encoder_layers(settings: dict[str, Any], xp: Any, dtype: str = "float32") -> tuple[EncoderLayer, ...]:
    """Return the layers of the stack, post-norm with ReLU (Vaswani et al., 2017)."""
    factory = LayerFactory(
        config({**settings, "vocabulary": FIRST_ID}, norm_position="post"), Initializer(xp, dtype=dtype)
    )
    return tuple(factory.encoder_layer(i) for i in range(settings["layers"]))


def features(settings: dict[str, Any]) -> Any:
    """Return the NumPy input of the stack: (batch, length, d_model)."""
    shape = settings["batch"], settings["length"], settings["heads"] * settings["head_dim"]
    return np.random.default_rng(0).standard_normal(shape, dtype="float32")


def build_encoder(settings: dict[str, Any]) -> Computation:
    """Build the stack by xformer on settings["backend"]; with settings["packed"], pack its weights and use jit."""
    backend = Backend.from_settings(settings)

    def forward(layers: tuple[EncoderLayer, ...], x: Any) -> tuple[Any]:
        for layer in layers:
            x = layer(x)
        return (x,)

    layers = encoder_layers(settings, backend.xp, backend.dtype)
    if settings.get("packed"):
        return backend.computation(jit(forward), tuple(map(pack, layers)), backend.array(features(settings)))
    return backend.computation(forward, layers, backend.array(features(settings)))
