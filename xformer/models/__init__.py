"""Models: networks built from one configuration."""

from xformer.models.base import BaseModel, load
from xformer.models.cache import DecodingCache
from xformer.models.config import LanguageModelConfig, ModelConfig, TransformerConfig
from xformer.models.language_model import LanguageModel
from xformer.models.transformer import Transformer

__all__ = [
    "BaseModel",
    "DecodingCache",
    "LanguageModel",
    "LanguageModelConfig",
    "ModelConfig",
    "Transformer",
    "TransformerConfig",
    "load",
]
