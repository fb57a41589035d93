"""Whole models: an encoder stack, and what is common to the works that train and translate."""

from __future__ import annotations

import importlib
from typing import Any

from xformer.benchmarks.interleaved import Case, in_dtype
from xformer.benchmarks.workload import Library, Work
from xformer.layers import EncoderLayer, Initializer
from xformer.models import TransformerConfig
from xformer.models.builder import LayerFactory

FIRST_ID = 4  # below are padding, start, end and unknown tokens


def encoder_case(settings: dict[str, Any]) -> Case:
    """The case of an encoder stack.

    settings: batch, length, heads, head_dim, layers; d_model is heads * head_dim, d_ff four times that.
    """
    d_model, tokens = settings["heads"] * settings["head_dim"], settings["batch"] * settings["length"]
    name = f"encoder {settings['batch']}x{settings['length']}, {settings['layers']} layers, d_model {d_model}, forward"
    flops = tokens * settings["layers"] * layer_flops(d_model, 4 * d_model, settings["length"])
    return Case(in_dtype(name, settings), settings, (tokens,), flops)


def layer_flops(d_model: int, d_ff: int, keys: int) -> int:
    """Operations of an encoder layer for a token, in matrix products: projections, feed-forward, scores, averages."""
    return 8 * d_model**2 + 4 * d_model * d_ff + 4 * d_model * keys


def model_flops(config: TransformerConfig, tokens: int, length: int) -> int:
    """Operations of a forward pass in matrix products: so many tokens on both sides, in sentences of one length."""
    d_model = config.d_model
    layer = layer_flops(d_model, config.d_ff, length)
    causal, cross = 4 * d_model * (length // 2), 8 * d_model**2 + 4 * d_model * length
    decoder = config.num_decoder_layers * (layer - causal + cross) + 2 * d_model * config.target_vocab_size
    return tokens * (config.num_encoder_layers * layer + decoder)


def config(settings: dict[str, Any], **differences: Any) -> TransformerConfig:
    """A model of these sizes with one vocabulary and one table, without dropout."""
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
    return TransformerConfig(**{**values, **differences})


def sentences(batch: int, length: int, vocabulary: int, *, seed: int = 0) -> list[list[int]]:
    """Random tokens."""
    rng = importlib.import_module("numpy").random.default_rng(seed)
    return rng.integers(FIRST_ID, vocabulary, (batch, length)).tolist()  # type: ignore[no-any-return]


def encoder_layers(settings: dict[str, Any], xp: Any, dtype: str = "float32") -> tuple[EncoderLayer, ...]:
    """The layers of the stack, post-norm with ReLU, as in the paper."""
    parts = LayerFactory(
        config({**settings, "vocabulary": FIRST_ID}, norm_position="post"), Initializer(xp, dtype=dtype)
    )
    return tuple(parts.encoder_layer() for _ in range(settings["layers"]))


def features(settings: dict[str, Any]) -> Any:
    """What goes in, in NumPy: (batch, length, d_model)."""
    shape = settings["batch"], settings["length"], settings["heads"] * settings["head_dim"]
    return importlib.import_module("numpy").random.default_rng(0).standard_normal(shape, dtype="float32")


def encoder(settings: dict[str, Any]) -> Work:
    """The stack by xformer, on the library that settings["backend"] names."""
    library = Library.of(settings)

    def forward(layers: tuple[EncoderLayer, ...], x: Any) -> tuple[Any]:
        for layer in layers:
            x = layer(x)
        return (x,)

    layers = encoder_layers(settings, library.xp, library.dtype)
    return library.work(forward, layers, library.array(features(settings)))
