"""NumPy kernels: buffers are reused, passes merged, and matrix products kept whole.

Each is tested against its portable definition. A kernel never writes to its inputs. Residuals belong to the kernel that
made them, and a trace pulls each record back once, so derivatives may overwrite residuals.
"""

from xformer.kernels.numpy import attention as attention
from xformer.kernels.numpy import flash_attention as flash_attention
from xformer.kernels.numpy import gelu as gelu
from xformer.kernels.numpy import linear as linear
from xformer.kernels.numpy import optimizer as optimizer
from xformer.kernels.numpy import rowwise as rowwise
