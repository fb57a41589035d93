"""Models: networks built from one configuration."""

from xformer.layers.cache import DecodingCache
from xformer.models.attention_maps import attention_maps
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
from xformer.models.encoder import AttentionPooler, Encoder, MaskedLMHead, Pooler
from xformer.models.image_encoder import ImageEncoder, ImageTextEncoder
from xformer.models.language_model import LanguageModel
from xformer.models.transformer import SpeechTransformer, Transformer

__all__ = [
    "AttentionPooler", "BaseModel", "DecodingCache", "Encoder", "EncoderConfig", "ImageEncoder", "ImageEncoderConfig",
    "ImageTextEncoder", "ImageTextEncoderConfig", "LanguageModel", "LanguageModelConfig", "MaskedLMHead", "ModelConfig",
    "Pooler", "SpeechTransformer", "SpeechTransformerConfig", "Transformer", "TransformerConfig", "attention_maps",
    "load",
]  # fmt: skip
