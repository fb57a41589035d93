"""Experts on torch on a CPU, each of which computes its own rows."""

from __future__ import annotations

from typing import Any

import torch

from xformer.ops.experts.definition import sliced_forward, sliced_vjp
from xformer.ops.operation import Kernel


def _why_not(x: Any, numbers: Any, *arrays: Any, **options: Any) -> str | None:
    if torch.compiler.is_compiling():
        return "torch.compile traces no sizes that depend on values"
    return None if numbers.device.type == "cpu" else f"device {numbers.device} (it would have to be waited for)"


KERNELS = [Kernel("torch.experts", "experts", "torch", sliced_forward, sliced_vjp, why_not=_why_not)]
