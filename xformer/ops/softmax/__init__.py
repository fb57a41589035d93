"""Masked softmax."""

from xformer.ops.softmax.definition import softmax

__all__ = ["softmax"]
