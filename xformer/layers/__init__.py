"""Layers: frozen modules of plain forward code on the Array API."""

from xformer.layers.attention import MultiHeadAttention
from xformer.layers.cache import FixedStore, KeyValueStore, LayerCache
from xformer.layers.copying import CopyHead
from xformer.layers.decoder import DecoderLayer
from xformer.layers.dropout import Dropout
from xformer.layers.embedding import Embedding, TokenInput
from xformer.layers.encoder import EncoderLayer
from xformer.layers.feed_forward import FeedForward, GatedFeedForward
from xformer.layers.initializer import Initializer
from xformer.layers.linear import Linear
from xformer.layers.normalization import LayerNorm, MaxScaledLayerNorm, RMSNorm
from xformer.layers.positions import (
    Alibi,
    LearnedPositions,
    RelativeBias,
    Rotary,
    Sinusoidal,
    remaining_length,
    sinusoidal,
)
from xformer.layers.projections import attention_from_projections, join_heads, split_fused
from xformer.layers.residual import PostNorm, PreNorm

__all__ = [
    "Alibi",
    "CopyHead",
    "DecoderLayer",
    "Dropout",
    "Embedding",
    "EncoderLayer",
    "FeedForward",
    "FixedStore",
    "GatedFeedForward",
    "Initializer",
    "KeyValueStore",
    "LayerCache",
    "LayerNorm",
    "LearnedPositions",
    "Linear",
    "MaxScaledLayerNorm",
    "MultiHeadAttention",
    "PostNorm",
    "PreNorm",
    "RMSNorm",
    "RelativeBias",
    "Rotary",
    "Sinusoidal",
    "TokenInput",
    "attention_from_projections",
    "join_heads",
    "remaining_length",
    "sinusoidal",
    "split_fused",
]
