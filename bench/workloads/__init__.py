"""Workloads of xformer that are not part of `xformer bench`."""
