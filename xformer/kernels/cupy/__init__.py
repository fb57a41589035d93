"""CuPy kernels; of several that serve a call, the one registered last comes first.

Those of our own CUDA are for what memory bounds: one pass where the portable code makes many. What a forward is given
is never written, except by the optimizer's, and no value is read on the host, so nothing waits for the GPU.
"""

from __future__ import annotations

import os

from xformer.kernels.cupy import attention as attention
from xformer.kernels.cupy import cublas as cublas
from xformer.kernels.cupy import cudnn_attention as cudnn_attention
from xformer.kernels.cupy import elementwise as elementwise
from xformer.kernels.cupy import linear as linear
from xformer.kernels.cupy import norms as norms
from xformer.kernels.cupy import optimizer as optimizer
from xformer.kernels.cupy import softmax as softmax

if cublas.tf32():  # CuPy's own products, of matrices, ask at the first one
    os.environ["CUPY_TF32"] = "1"
