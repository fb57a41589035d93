"""Dropout on torch."""

from __future__ import annotations

from typing import Any

from xformer.ops.operation import Kernel


def _forward(x: Any, mask: Any, *, keep_probability: float, save: bool) -> tuple[Any, Any]:
    return (x * (1.0 / keep_probability)).masked_fill(~mask, 0.0), mask


def _vjp(g: Any, mask: Any, needs: Any, *, keep_probability: float) -> tuple[Any, ...]:
    return _forward(g, mask, keep_probability=keep_probability, save=False)[0], None


KERNELS = [Kernel("torch.dropout", "dropout", "torch", _forward, _vjp)]
