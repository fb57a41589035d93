"""Adam on NumPy by the native library, in place."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from xformer import native
from xformer.ops._native import native_kernel
from xformer.ops._native import why_not as why_not_aligned
from xformer.ops.adam.definition import Settings, slots, updated, writable


def _why_not(grad_scale: Any, *arrays: Any, **options: Any) -> str | None:
    """Return why the arrays cannot be updated in place, element by element, or None."""
    for parameter, _, exp_avg, exp_avg_sq in slots(arrays):
        p, m, v = parameter.flags, exp_avg.flags, exp_avg_sq.flags
        if not (p.writeable and m.writeable and v.writeable):
            return "an array is read-only"
        if not (p.c_contiguous and m.c_contiguous and v.c_contiguous) and not (
            p.f_contiguous and m.f_contiguous and v.f_contiguous
        ):
            return "arrays are not contiguous, or differ in memory order"
    return why_not_aligned(*arrays)


def _adam(
    grad_scale: Any, *arrays: Any, settings: Settings, weight_decay: Sequence[float], donate: bool, save: bool
) -> tuple[Any, Any]:
    """Update each parameter; arrays in Fortran order are transposed, as elements are independent of each other."""
    arrays, settings = tuple(writable(arrays, donate)), Settings(*map(float, settings))
    scale = 1.0 if grad_scale is None else float(grad_scale)
    if not math.isnan(scale):  # which skips the update
        numbers = np.asarray([*settings[:5], scale])
        for (p, g, m, v), rate in zip(slots(arrays), weight_decay, strict=True):
            if not p.flags.c_contiguous:
                p, g, m, v = p.T, g.T, m.T, v.T
            native.call("adam", (p, native.contiguous(g), m, v, numbers), n0=settings.decay(rate))
    return updated(arrays), None


KERNELS = [native_kernel("adam", _adam, None, why_not=_why_not, is_recordable=False)]
