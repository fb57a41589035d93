"""CuPy kernels; of several that serve a call, the one registered last comes first.

Those of our own CUDA are for what memory bounds: one pass where the portable code makes many. What a forward is given
is never written, except by the optimizer's, and no value is read on the host, so nothing waits for the GPU.
"""

from __future__ import annotations

import os

from xformer.kernels import cupy_attention as cupy_attention
from xformer.kernels import cupy_cudnn as cupy_cudnn
from xformer.kernels import cupy_elementwise as cupy_elementwise
from xformer.kernels import cupy_linear as cupy_linear
from xformer.kernels import cupy_norms as cupy_norms
from xformer.kernels import cupy_optimizer as cupy_optimizer
from xformer.kernels import cupy_softmax as cupy_softmax
from xformer.kernels.cupy_products import tf32

if tf32():  # CuPy's own products, of matrices, ask at the first one
    os.environ["CUPY_TF32"] = "1"
