"""Linear maps, and projections into heads."""

from xformer.ops.linear.definition import Projection, linear, merge_heads, project_heads, split_heads

__all__ = ["Projection", "linear", "merge_heads", "project_heads", "split_heads"]
