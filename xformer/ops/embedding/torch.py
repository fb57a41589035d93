"""Embedding on torch."""

from __future__ import annotations

from typing import Any

import torch

from xformer.ops._torch import WIDE_FLOATS
from xformer.ops.operation import Kernel


def _forward(weight: Any, ids: Any, *, scale: float, save: bool) -> tuple[Any, Any]:
    y = torch.nn.functional.embedding(ids, weight)
    return (y if scale == 1.0 else y * scale), (ids, len(weight))


def _vjp(g: Any, residuals: Any, needs: Any, *, scale: float) -> tuple[Any, ...]:
    ids, vocabulary = residuals
    g = g if scale == 1.0 else g * scale
    return torch.ops.aten.embedding_dense_backward(g, ids, vocabulary, -1, False), None


def _why_not(weight: Any, ids: Any, **options: Any) -> str | None:
    return None if ids.dtype in (torch.int32, torch.int64) else f"ids of dtype {ids.dtype}"


KERNELS = [Kernel("torch.embedding", "embedding", "torch", _forward, _vjp, dtypes=WIDE_FLOATS, why_not=_why_not)]
