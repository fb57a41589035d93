"""Adam on CuPy, many parameters per launch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from xformer.backends import array_namespace, dtype_name
from xformer.kernels.cupy import cublas
from xformer.kernels.cupy import launch as cuda_launch
from xformer.kernels.cupy.arrays import compute_dtype, contiguous, is_compatible_dtype, why_not
from xformer.kernels.cupy.tables import BLOCK_ELEMENTS, MAX_SLOTS, SLOTS, THREADS, batches, table_of
from xformer.ops.adam import Settings, Slot, slots, updated, writable
from xformer.ops.operation import Kernel
from xformer.tree import is_array


def _why_not(grad_scale: Any, *arrays: Any, **options: Any) -> str | None:
    for parameter, gradient, exp_avg, exp_avg_sq in slots(arrays):
        if reason := why_not(parameter):
            return reason
        if not is_compatible_dtype(gradient, parameter):
            return f"a gradient of dtype {dtype_name(gradient.dtype)} for a {dtype_name(parameter.dtype)} parameter"
        if exp_avg.dtype != compute_dtype(parameter) or exp_avg_sq.dtype != exp_avg.dtype:
            return f"moments of dtype {dtype_name(exp_avg.dtype)} for a {dtype_name(parameter.dtype)} parameter"
        in_place = parameter, exp_avg, exp_avg_sq
        if not any(all(array.flags[order] for array in in_place) for order in ("C_CONTIGUOUS", "F_CONTIGUOUS")):
            return "arrays are not contiguous, or differ in memory order"
    return None


def _in_order(slot: Slot) -> tuple[Any, ...]:
    """Return a slot with the gradient in the memory order of the parameter."""
    parameter, gradient, exp_avg, exp_avg_sq = slot
    if parameter.flags.c_contiguous:
        return parameter, contiguous(gradient), exp_avg, exp_avg_sq
    return parameter, array_namespace(gradient).asfortranarray(gradient), exp_avg, exp_avg_sq


def _forward(
    grad_scale: Any, *arrays: Any, settings: Settings, weight_decay: Sequence[float], donate: bool, save: bool
) -> tuple[Any, Any]:
    arrays, xp, schedule = tuple(writable(arrays, donate)), array_namespace(*arrays), None
    changing = settings.step_size, settings.bias_correction2, settings.learning_rate
    if any(is_array(number) for number in changing):
        zero = xp.zeros((), dtype=xp.float64)
        schedule = xp.stack([zero + number for number in changing])
        settings = settings._replace(step_size=0.0, bias_correction2=0.0, learning_rate=0.0)
    items = [(*_in_order(slot), rate) for slot, rate in zip(slots(arrays), weight_decay, strict=True)]
    for dtypes, batch in batches(items, MAX_SLOTS):
        fields = zip(("parameters", "gradients", "exp_avgs", "exp_avg_sqs"), zip(*batch, strict=True), strict=False)
        columns = {name: [cublas.pointer(array) for array in column] for name, column in fields}
        sizes, rates = tuple(item[0].size for item in batch), tuple(item[4] for item in batch)
        table, blocks = table_of(SLOTS, columns, sizes=sizes, weight_decays=rates)
        scale = None if grad_scale is None else contiguous(grad_scale, compute_dtype(batch[0][0]))
        arguments = table, BLOCK_ELEMENTS, *map(float, settings), scale, schedule
        cuda_launch.launch("optimizer.adam", dtypes, blocks, THREADS, *arguments)
    return updated(arrays), None


KERNELS = [Kernel("cupy.adam", "adam", "cupy", _forward, None, why_not=_why_not)]
