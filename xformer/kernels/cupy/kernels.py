"""The list of all kernels for CuPy but those of cuDNN."""

from __future__ import annotations

from xformer.kernels.cupy import (
    activations,
    adam,
    attention,
    cast,
    cross_entropy,
    dropout,
    embedding,
    linear,
    norms,
    softmax,
    squared_norm,
)

_MODULES = [
    activations,
    adam,
    attention,
    cast,
    cross_entropy,
    dropout,
    embedding,
    linear,
    norms,
    softmax,
    squared_norm,
]
KERNELS = [kernel for module in _MODULES for kernel in module.KERNELS]
