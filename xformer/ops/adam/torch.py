"""Adam by torch's fused AdamW, in one pass over memory."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch

from xformer.ops._torch import WIDE_FLOATS, is_differentiated_by_torch
from xformer.ops.adam.definition import Settings, slots, updated, writable
from xformer.ops.operation import Kernel

_NO_BIAS_CORRECTION = 1e9  # steps, after which torch's own bias correction is 1


def _why_not(grad_scale: Any, *slot_arrays: Any, settings: Any = (), **options: Any) -> str | None:
    if not all(isinstance(number, float) for number in settings):
        return "settings are arrays"
    for index, array in enumerate(slot_arrays):
        if index % 4 != 1 and not array.is_contiguous():
            return "an array is not contiguous"
    if len({array.device for array in slot_arrays}) > 1:
        return "arrays on several devices"
    return "torch differentiates the update" if is_differentiated_by_torch(*slot_arrays) else None


def _forward(
    grad_scale: Any, *arrays: Any, settings: Settings, weight_decay: Sequence[float], donate: bool, save: bool
) -> tuple[Any, Any]:
    """Update with torch's fused AdamW, moving the bias correction c of the second moment out of the root.

    a m / (sqrt(c v) + e) = a/sqrt(c) m / (sqrt(v) + e/sqrt(c))
    """
    arrays = tuple(writable(arrays, donate))
    step_size, beta1, beta2, bias_correction2, epsilon, learning_rate = settings
    root, skip = math.sqrt(bias_correction2), None
    # torch multiplies the decay by its learning rate, which contains both bias corrections.
    bias_correction1 = learning_rate / step_size if step_size else 0.0
    scale, device = grad_scale, arrays[0].device
    if grad_scale is not None and device.type == "cpu":  # reading a value on the CPU needs no synchronization
        scale = float(grad_scale)
        if math.isnan(scale):
            return updated(arrays), None
    elif grad_scale is not None:
        skip = torch.isnan(grad_scale).to(torch.float32)
    steps = torch.full((), _NO_BIAS_CORRECTION, dtype=torch.float32, device=device)
    by_decay = sorted(zip(weight_decay, slots(arrays), strict=True), key=lambda pair: pair[0])
    for rate, group in itertools.groupby(by_decay, key=lambda pair: pair[0]):
        parameters, gradients, exp_avgs, exp_avg_sqs = map(list, zip(*(slot for _, slot in group), strict=True))
        if scale is not None and (skip is not None or scale != 1.0):
            gradients = [gradient * scale for gradient in gradients]
        torch._fused_adamw_(
            parameters,
            [gradient.contiguous() for gradient in gradients],
            exp_avgs,
            exp_avg_sqs,
            [],
            [steps] * len(parameters),
            lr=step_size / root,
            beta1=beta1,
            beta2=beta2,
            weight_decay=rate * bias_correction1 * root,
            eps=epsilon / root,
            amsgrad=False,
            maximize=False,
            found_inf=skip,
        )
    return updated(arrays), None


KERNELS = [Kernel("torch.adam", "adam", "torch", _forward, None, dtypes=WIDE_FLOATS, why_not=_why_not)]
