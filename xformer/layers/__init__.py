"""Layers: immutable modules whose forward code uses the Array API only."""

from xformer.errors import explain_moved_names as _explain_moved_names
from xformer.layers.attention import DisentangledAttention, FamilyAttention, MultiHeadAttention
from xformer.layers.basic import Dropout, Identity, Initializer, LayerNorm, Linear, MaxScaledLayerNorm, RMSNorm
from xformer.layers.cache import KVCache, LayerCache
from xformer.layers.convolution import AudioEmbedding, Conv1d, PatchEmbedding
from xformer.layers.embedding import Embedding, InputEmbedding
from xformer.layers.feed_forward import (
    ClampedFeedForward,
    FeedForward,
    GatedFeedForward,
    MixtureOfExperts,
    RecordedRouting,
    load_balancing_loss,
    record_routing,
)
from xformer.layers.pointer_generator import CopyHead
from xformer.layers.positions import (
    ALiBi,
    LearnedPositions,
    RelativeBias,
    RelativeEmbedding,
    Rotary,
    Sinusoidal,
    remaining_length,
    sinusoidal,
)
from xformer.layers.transformer import (
    ConvolutionEncoderLayer,
    DecoderLayer,
    EncoderLayer,
    OutputNorm,
    ParallelEncoderLayer,
    PostNorm,
    PreNorm,
    SandwichNorm,
    SharedNormEncoderLayer,
)
from xformer.layers.weights import LoraWeight, lora, merge_lora, pack, quantize, unpack

_explain_moved_names(__name__)

__all__ = [
    "ALiBi", "AudioEmbedding", "ClampedFeedForward", "Conv1d", "ConvolutionEncoderLayer", "CopyHead", "DecoderLayer",
    "DisentangledAttention", "Dropout", "Embedding", "EncoderLayer", "FamilyAttention", "FeedForward",
    "GatedFeedForward", "Identity", "Initializer", "InputEmbedding", "KVCache", "LayerCache", "LayerNorm",
    "LearnedPositions", "Linear", "LoraWeight", "MaxScaledLayerNorm", "MixtureOfExperts", "MultiHeadAttention",
    "OutputNorm", "ParallelEncoderLayer", "PatchEmbedding", "PostNorm", "PreNorm", "RMSNorm", "RecordedRouting",
    "RelativeBias", "RelativeEmbedding", "Rotary", "SandwichNorm", "SharedNormEncoderLayer", "Sinusoidal",
    "load_balancing_loss", "lora", "merge_lora", "pack", "quantize", "record_routing", "remaining_length", "sinusoidal",
    "unpack",
]  # fmt: skip
