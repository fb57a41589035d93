"""The list of all kernels for CuPy but those of cuDNN."""

from __future__ import annotations

from xformer.kernels.cupy import attention, elementwise, linear, optimizer, rows

KERNELS = [kernel for module in (elementwise, rows, linear, attention, optimizer) for kernel in module.KERNELS]
