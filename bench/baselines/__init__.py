"""Implementations of the workloads by other libraries, each in its fastest configuration."""
