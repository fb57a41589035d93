"""CuPy kernels; of several that serve a call, the one registered last comes first."""

from __future__ import annotations

from xformer.kernels import cupy_attention as cupy_attention
from xformer.kernels import cupy_cudnn as cupy_cudnn
