"""Casts of many arrays."""

from xformer.ops.cast.definition import cast

__all__ = ["cast"]
