"""The sum of squares of many arrays."""

from xformer.ops.squared_norm.definition import squared_norm

__all__ = ["squared_norm"]
