"""Pipelines: text in, text out."""

from xformer.pipelines.translation import Translator

__all__ = ["Translator"]
