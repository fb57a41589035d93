"""Apply a different module to each group of rows, as in a mixture of experts."""

from xformer.ops.experts.definition import apply_experts

__all__ = ["apply_experts"]
