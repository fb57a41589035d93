"""Models: whole networks from one configuration."""

from xformer.models.config import TransformerConfig
from xformer.models.transformer import Transformer

__all__ = ["Transformer", "TransformerConfig"]
