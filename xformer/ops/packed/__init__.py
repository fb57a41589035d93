"""Weights in panels of columns, and linear maps with them."""

from xformer.ops.packed.definition import PackedWeight, packed_weights

__all__ = ["PackedWeight", "packed_weights"]
