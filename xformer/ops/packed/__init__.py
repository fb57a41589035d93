"""Weights in panels of columns, and linear maps with them."""

from xformer.ops.packed.definition import PackedWeight

__all__ = ["PackedWeight"]
