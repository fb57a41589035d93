"""Adam on NumPy, in place: the definition updates one parameter after another, so that memory for one is enough."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from xformer.ops.adam.definition import forward, slots, updated
from xformer.ops.operation import Kernel


def _why_not(grad_scale: Any, *arrays: Any, donate: bool = False, **options: Any) -> str | None:
    if not donate:
        return "the arrays are not donated"
    written: Any = updated(arrays)
    return None if all(array.flags.writeable for array in written) else "an array is read-only"


def _forward(
    grad_scale: Any, *arrays: Any, weight_decay: Sequence[float], save: bool, **options: Any
) -> tuple[Any, Any]:
    for slot, rate in zip(slots(arrays), weight_decay, strict=True):
        results, _ = forward(grad_scale, *slot, weight_decay=(rate,), save=save, **options)
        for array, result in zip(updated(slot), results, strict=True):
            array[...] = result
    return updated(arrays), None


KERNELS = [Kernel("numpy.adam", "adam", "numpy", _forward, None, dtypes=("float32", "float64"), why_not=_why_not)]
