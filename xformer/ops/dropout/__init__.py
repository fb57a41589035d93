"""Dropout."""

from xformer.ops.dropout.definition import dropout

__all__ = ["dropout"]
