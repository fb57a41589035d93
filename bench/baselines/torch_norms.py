"""Layer normalization by torch."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from workloads.norms import make_inputs

from baselines.torch_support import device_and_dtype, torch_computation
from xformer.benchmarks.computation import Computation


def build(settings: dict[str, Any]) -> Computation:
    """Build torch.nn.functional.layer_norm."""
    inputs = [torch.from_numpy(array).to(**device_and_dtype(settings)) for array in make_inputs(settings)]
    return torch_computation(lambda x, *parameters: nn.functional.layer_norm(x, x.shape[-1:], *parameters), inputs)
