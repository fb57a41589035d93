"""Experts on torch on a CPU, each of which computes its own rows."""

from __future__ import annotations

from typing import Any

from xformer.backends import is_host_accessible
from xformer.ops.experts.definition import sliced_forward, sliced_vjp
from xformer.ops.operation import Kernel


def _why_not(x: Any, expert_indices: Any, *arrays: Any, **options: Any) -> str | None:
    return None if is_host_accessible(expert_indices) else "expert_indices cannot be read, or only after a wait"


KERNELS = [Kernel("torch.experts", "experts", "torch", sliced_forward, sliced_vjp, why_not=_why_not)]
