"""Capture and replay: `capture(function)` repeats the array operations of a function without its Python code."""
