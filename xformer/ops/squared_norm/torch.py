"""The sum of squares on torch."""

from __future__ import annotations

from typing import Any

import torch

from xformer.ops._torch import WIDE_FLOATS
from xformer.ops.operation import Kernel


def _forward(*arrays: Any, save: bool) -> tuple[Any, Any]:
    return torch.stack([torch.linalg.vector_norm(x) for x in arrays]).square().sum(), arrays


def _vjp(g: Any, arrays: Any, needs: Any) -> tuple[Any, ...]:
    return tuple(x * (2.0 * g) for x in arrays)


KERNELS = [Kernel("torch.squared_norm", "squared_norm", "torch", _forward, _vjp, dtypes=WIDE_FLOATS)]
