"""Helpers shared by the CuPy kernels: launches of our CUDA sources, cuBLAS and cuDNN.

The kernels are experimental: their tests run on the CPU, without a GPU. Our own CUDA sources are for operations bound
by memory bandwidth: one pass where the portable code makes several. Kernels do not write to their inputs, except for
Adam's, and do not read values on the host, so they never wait for the GPU.
"""

from __future__ import annotations

import os

from xformer.kernels.cupy import cublas

if cublas.tf32():  # read by CuPy's own products of 2D matrices
    os.environ["CUPY_TF32"] = "1"
