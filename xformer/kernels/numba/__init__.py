"""Kernels for float32 NumPy arrays that numba compiles: one pass over memory instead of several.

Modules with registered kernels import numba, and compile, at the first call that needs it. Those with `_kernels` in
their names, `gemm`, `microkernel`, `attention_forward` and `attention_backward` hold the compiled functions.
"""

from xformer.kernels.numba import attention as attention
from xformer.kernels.numba import linear as linear
from xformer.kernels.numba import quantized as quantized
from xformer.kernels.numba import rowwise as rowwise
