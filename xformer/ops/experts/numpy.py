"""Experts on NumPy, each of which computes its own rows."""

from __future__ import annotations

from xformer.ops.experts.definition import sliced_forward, sliced_vjp
from xformer.ops.operation import Kernel

KERNELS = [Kernel("numpy.experts", "experts", "numpy", sliced_forward, sliced_vjp)]
