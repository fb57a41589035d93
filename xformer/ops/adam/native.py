"""Adam on NumPy by the native library, in place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from xformer import native
from xformer.ops._native import native_kernel
from xformer.ops._native import why_not as why_not_aligned
from xformer.ops.adam.definition import Settings, slots, updated, writable
from xformer.ops.adam.numpy import read_grad_scale
from xformer.ops.adam.numpy import why_not as why_not_in_place


def _why_not(grad_scale: Any, *arrays: Any, **options: Any) -> str | None:
    return why_not_in_place(grad_scale, *arrays, **options) or why_not_aligned(*arrays)


def _adam(
    grad_scale: Any, *arrays: Any, settings: Settings, weight_decay: Sequence[float], donate: bool, save: bool
) -> tuple[Any, Any]:
    """Update each parameter; arrays in Fortran order are transposed, as elements are independent of each other."""
    arrays, settings = tuple(writable(arrays, donate)), Settings(*map(float, settings))
    scale = read_grad_scale(grad_scale)
    if scale is not None:
        numbers = np.asarray([*settings[:5], scale])
        for (p, g, m, v), rate in zip(slots(arrays), weight_decay, strict=True):
            if not p.flags.c_contiguous:
                p, g, m, v = p.T, g.T, m.T, v.T
            native.call("adam", (p, native.contiguous(g), m, v, numbers), n0=settings.decay(rate))
    return updated(arrays), None


KERNELS = [native_kernel("adam", _adam, None, why_not=_why_not, is_recordable=False)]
