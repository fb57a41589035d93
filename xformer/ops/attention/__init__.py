"""Scaled dot-product attention."""

from xformer.ops.attention.definition import attention, attention_weights

__all__ = ["attention", "attention_weights"]
