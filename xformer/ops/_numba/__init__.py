"""Helpers shared by the numba kernels: compilation, threads, products, and vectorized mathematics."""
