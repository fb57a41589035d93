"""NumPy kernels: they reuse buffers, merge passes over memory, and compute one matrix product instead of several.

A kernel does not write to its inputs, except for the optimizers'. The backward pass uses each record once, so a
derivative may overwrite the residuals of its forward.
"""

from xformer.kernels.numpy import attention as attention
from xformer.kernels.numpy import flash_attention as flash_attention
from xformer.kernels.numpy import gelu as gelu
from xformer.kernels.numpy import linear as linear
from xformer.kernels.numpy import optimizer as optimizer
from xformer.kernels.numpy import rowwise as rowwise
