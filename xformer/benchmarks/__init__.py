"""Interleaved benchmarks of speed and memory: workloads, implementations, and a description of the machine."""
