"""Models: networks built from one configuration."""

from xformer.layers.cache import DecodingCache
from xformer.models.base import BaseModel, load
from xformer.models.config import (
    EncoderConfig,
    ImageEncoderConfig,
    ImageTextEncoderConfig,
    LanguageModelConfig,
    ModelConfig,
    SpeechTransformerConfig,
    TransformerConfig,
)
from xformer.models.encoder import AttentionPooler, Encoder, ImageEncoder, ImageTextEncoder, MaskedLMHead, Pooler
from xformer.models.language_model import LanguageModel
from xformer.models.transformer import SpeechTransformer, Transformer, attention_maps

__all__ = [
    "AttentionPooler", "BaseModel", "DecodingCache", "Encoder", "EncoderConfig", "ImageEncoder", "ImageEncoderConfig",
    "ImageTextEncoder", "ImageTextEncoderConfig", "LanguageModel", "LanguageModelConfig", "MaskedLMHead", "ModelConfig",
    "Pooler", "SpeechTransformer", "SpeechTransformerConfig", "Transformer", "TransformerConfig", "attention_maps",
    "load",
]  # fmt: skip
