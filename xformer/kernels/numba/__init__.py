"""Kernels for float32 NumPy arrays that numba compiles: one pass over memory in place of many.

numba is imported, and a kernel compiled, at the first call that needs it.
"""

from xformer.kernels.numba import attention as attention
from xformer.kernels.numba import matmul as matmul
from xformer.kernels.numba import rowwise as rowwise
