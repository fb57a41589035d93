"""Layers: frozen modules of plain forward code on the Array API."""

from xformer.layers.attention import MultiHeadAttention
from xformer.layers.decoder import DecoderLayer
from xformer.layers.dropout import Dropout
from xformer.layers.embedding import Embedding
from xformer.layers.encoder import EncoderLayer
from xformer.layers.feed_forward import FeedForward
from xformer.layers.initializer import Initializer
from xformer.layers.linear import Linear
from xformer.layers.normalization import LayerNorm
from xformer.layers.positions import sinusoidal
from xformer.layers.residual import Residual

__all__ = [
    "DecoderLayer",
    "Dropout",
    "Embedding",
    "EncoderLayer",
    "FeedForward",
    "Initializer",
    "LayerNorm",
    "Linear",
    "MultiHeadAttention",
    "Residual",
    "sinusoidal",
]
