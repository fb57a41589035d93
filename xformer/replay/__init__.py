"""Capture and replay: `capture(function)` repeats the array operations of a function without its Python code."""

from xformer.replay.function import capture

__all__ = ["capture"]
