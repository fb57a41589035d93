"""Cross-entropy."""

from xformer.ops.cross_entropy.definition import cross_entropy

__all__ = ["cross_entropy"]
