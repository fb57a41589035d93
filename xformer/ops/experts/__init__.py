"""Modules that are applied to the rows of a batch that belong to them."""

from xformer.ops.experts.definition import apply_experts

__all__ = ["apply_experts"]
