"""Decoding: from a trained model to tokens."""

from xformer.generation.cache import DecodingCache
from xformer.generation.greedy import greedy

__all__ = ["DecodingCache", "greedy"]
