"""Adam on NumPy, compiled by numba."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba.types import float64

from xformer.ops._numba.compile import compiled_kernel, in_array, kernel, out_array
from xformer.ops._numba.compile import why_not as why_not_compiled
from xformer.ops.adam.definition import Settings, slots, updated, writable
from xformer.ops.adam.numpy import elements, read_grad_scale
from xformer.ops.adam.numpy import why_not as why_not_in_place
from xformer.threads import parallel_map

_f32 = np.float32  # a Python number would turn a computation into float64


@kernel(out_array(1), in_array(1), out_array(1), out_array(1), *[float64] * 7)
def adam_kernel(p, g, m, v, step_size, beta1, beta2, bias_correction2, epsilon, decay, grad_scale):
    """Update parameter p and its moments m and v in place, with the gradient grad_scale g."""
    b1, c1, b2, c2 = _f32(beta1), _f32(1.0 - beta1), _f32(beta2), _f32(1.0 - beta2)
    a, correction, eps, shrink = _f32(step_size), _f32(bias_correction2), _f32(epsilon), _f32(decay)
    for i in range(p.size):
        gradient = _f32(grad_scale) * g[i]
        m[i] = b1 * m[i] + c1 * gradient
        v[i] = b2 * v[i] + c2 * (gradient * gradient)
        p[i] = shrink * p[i] - a * m[i] / (math.sqrt(v[i] * correction) + eps)


_MIN_ELEMENTS = 200_000  # about 0.3 ms; below, starting threads costs more than it saves


def _why_not(grad_scale: Any, *arrays: Any, **options: Any) -> str | None:
    return why_not_in_place(grad_scale, *arrays, **options) or why_not_compiled(*arrays)


def _adam(
    grad_scale: Any, *arrays: Any, settings: Settings, weight_decay: Any, donate: bool, save: bool
) -> tuple[Any, Any]:
    """Update large parameters first, on several threads if that pays off."""
    arrays, settings = tuple(writable(arrays, donate)), Settings(*map(float, settings))
    scale = read_grad_scale(grad_scale)
    if scale is None:
        return updated(arrays), None
    items = [
        (*elements(*slot), *settings[:5], settings.decay(rate), scale)
        for slot, rate in zip(slots(arrays), weight_decay, strict=True)
    ]
    sizes = [item[0].size for item in items]
    if sum(sizes) < _MIN_ELEMENTS:
        for item in items:
            adam_kernel(*item)
    else:
        largest_first = [items[index] for index in np.argsort(sizes)[::-1]]
        parallel_map(lambda item: adam_kernel(*item), largest_first)
    return updated(arrays), None


KERNELS = [
    compiled_kernel("adam", _adam, None, why_not=_why_not, is_recordable=False),
]
