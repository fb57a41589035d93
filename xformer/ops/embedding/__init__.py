"""Embedding."""

from xformer.ops.embedding.definition import embedding

__all__ = ["embedding"]
