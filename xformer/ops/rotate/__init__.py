"""Rotation of pairs of features."""

from xformer.ops.rotate.definition import rotate

__all__ = ["rotate"]
