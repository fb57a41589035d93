"""Adam and AdamW."""

from xformer.ops.adam.definition import adam, zero_moment

__all__ = ["adam", "zero_moment"]
