"""Layer normalization by torch."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from works.norms import inputs

from peers.torch_support import position_terms, torch_work
from xformer.benchmarks import Work


def work(settings: dict[str, Any]) -> Work:
    """torch.nn.functional.layer_norm."""
    given = [torch.from_numpy(array).to(**position_terms(settings)) for array in inputs(settings)]
    return torch_work(lambda x, *parameters: nn.functional.layer_norm(x, x.shape[-1:], *parameters), given)
