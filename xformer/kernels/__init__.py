"""Kernels of operations, by array library. A library's are imported when its first operation runs."""
