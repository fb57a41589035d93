"""Helpers shared by the torch kernels.

torch kernels are the library's own fused functions. Outside our own differentiation (`save=False`) they are public
functions, which torch differentiates and compiles. Inside it, they are the pairs of forward and backward functions that
torch's autograd itself calls, because arrays do not require grad there, and inference mode has no autograd. A kernel
does not write to its inputs, except for Adam's.
"""

from __future__ import annotations

from typing import Any

import torch

FLOATS = ("float16", "bfloat16", "float32", "float64")
WIDE_FLOATS = ("float32", "float64")


def is_differentiated_by_torch(*arrays: Any) -> bool:
    """Return whether torch's autograd records operations on the arrays."""
    return torch.is_grad_enabled() and any(array is not None and array.requires_grad for array in arrays)
