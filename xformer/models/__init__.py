"""Models: whole networks from one configuration."""

from xformer.models.cache import DecodingCache
from xformer.models.config import LanguageModelConfig, ModelConfig, TransformerConfig
from xformer.models.language_model import LanguageModel
from xformer.models.saving import Model
from xformer.models.transformer import Transformer

__all__ = [
    "DecodingCache",
    "LanguageModel",
    "LanguageModelConfig",
    "Model",
    "ModelConfig",
    "Transformer",
    "TransformerConfig",
]
