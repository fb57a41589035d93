"""What decoding computes from the scores of a vocabulary."""

from xformer.ops.decoding.definition import log_sum_exp, top_k

__all__ = ["log_sum_exp", "top_k"]
