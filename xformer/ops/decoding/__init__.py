"""Largest elements, and logarithms of sums of exponentials, over the last axis."""

from xformer.ops.decoding.definition import log_softmax, logsumexp, top_k

__all__ = ["log_softmax", "logsumexp", "top_k"]
