"""Largest elements, and the logarithm of the sum of exponentials, over the last axis."""

from xformer.ops.decoding.definition import logsumexp, top_k

__all__ = ["logsumexp", "top_k"]
