"""CuPy kernels, which are experimental: their tests run on the CPU, without a GPU.

Our own CUDA sources are for operations bound by memory bandwidth: one pass where the portable code makes several.
Kernels do not write to their inputs, except for the optimizer's, and do not read values on the host, so they never
wait for the GPU.
"""

from __future__ import annotations

import os

from xformer.kernels.cupy import attention as attention
from xformer.kernels.cupy import cublas
from xformer.kernels.cupy import cudnn_attention as cudnn_attention
from xformer.kernels.cupy import elementwise as elementwise
from xformer.kernels.cupy import linear as linear
from xformer.kernels.cupy import norms as norms
from xformer.kernels.cupy import optimizer as optimizer
from xformer.kernels.cupy import softmax as softmax

if cublas.tf32():  # read by CuPy's own products of 2D matrices
    os.environ["CUPY_TF32"] = "1"
