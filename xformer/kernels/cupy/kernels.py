"""The list of all kernels for CuPy but those of cuDNN."""

from __future__ import annotations

from xformer.kernels.cupy import attention, decoding, elementwise, experts, linear, optimizer, rows

MODULES = elementwise, rows, linear, attention, optimizer, decoding, experts
KERNELS = [kernel for module in MODULES for kernel in module.KERNELS]
