"""NumPy kernels that numba compiles: one pass over memory in the place of many, in float32.

They come on top of the other NumPy kernels, which serve all else. numba is imported, and a loop compiled, when one is
first needed; `loops` has the loops, and says where what is compiled is kept.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from xformer.kernels.numpy import gelu as numpy_gelu
from xformer.kernels.numpy import optimizer as numpy_optimizer
from xformer.kernels.numpy.support import compiled, flat, loops, nothing
from xformer.kernels.registry import Kernel, register
from xformer.ops.adam import rows, updated
from xformer.ops.linear import as_rows
from xformer.threads import parallel_map


def _rows(x: Any) -> Any:
    return np.ascontiguousarray(as_rows(x))


# --- elementwise ----------------------------------------------------------------------------------------------------

_TAIL = np.asarray(numpy_gelu.COEFFICIENTS, np.float32)


def _gelu_forward(x: Any, *, save: bool) -> tuple[Any, Any]:
    y = np.empty(x.shape, x.dtype)
    slope = np.empty_like(y) if save else nothing(1)
    loops().gelu(flat(x), _TAIL, numpy_gelu.P, y.reshape(-1), slope.reshape(-1))
    return y, slope


def _relu_forward(x: Any, *, save: bool) -> tuple[Any, Any]:
    y = np.empty(x.shape, x.dtype)
    loops().relu(flat(x), y.reshape(-1))
    return y, y


def _relu_vjp(g: Any, y: Any, needs: Any) -> tuple[Any, ...]:
    dx = np.empty(g.shape, g.dtype)
    loops().relu_vjp(flat(g), flat(y), dx.reshape(-1))
    return (dx,)


def _dropout_forward(x: Any, keep: Any, *, keep_probability: float, save: bool) -> tuple[Any, Any]:
    y = np.empty(x.shape, x.dtype)
    loops().dropout(flat(x), flat(keep, bool), 1.0 / keep_probability, y.reshape(-1))
    return y, keep


def _dropout_vjp(g: Any, keep: Any, needs: Any, *, keep_probability: float) -> tuple[Any, ...]:
    return _dropout_forward(g, keep, keep_probability=keep_probability, save=False)[0], None


def _dropout_supports(arrays: tuple[Any, ...], static: dict[str, Any]) -> str | None:
    x, keep = arrays
    return compiled(arrays, static) if x.shape == keep.shape else "keep is broadcast"


# --- norms ----------------------------------------------------------------------------------------------------------


def _norm_supports(arrays: tuple[Any, ...], static: dict[str, Any]) -> str | None:
    x, *learned = arrays
    if any(array is not None and array.shape != x.shape[-1:] for array in learned):
        return "weight or bias is broadcast"
    return compiled(arrays, static)


def _norm(x: Any, weight: Any, bias: Any, epsilon: float, centred: bool) -> tuple[Any, Any]:
    rows, weight = _rows(x), flat(weight)
    y, moments = np.empty_like(rows), np.empty((2, len(rows)), x.dtype)
    loops().norm(rows, weight, nothing(1) if bias is None else flat(bias), epsilon, centred, y, moments)
    return y.reshape(x.shape), (rows, weight, moments)


def _norm_vjp(g: Any, residuals: Any, centred: bool) -> tuple[Any, Any, Any]:
    rows, weight, moments = residuals
    dx, dweight, dbias = np.empty_like(rows), np.zeros_like(weight), np.zeros_like(weight)
    loops().norm_vjp(_rows(g), rows, weight, moments, centred, dx, dweight, dbias)
    return dx.reshape(g.shape), dweight, dbias


def _layer_norm_forward(x: Any, weight: Any, bias: Any, *, epsilon: float, save: bool) -> tuple[Any, Any]:
    return _norm(x, weight, bias, epsilon, True)


def _layer_norm_vjp(g: Any, residuals: Any, needs: Any, *, epsilon: float) -> tuple[Any, ...]:
    return _norm_vjp(g, residuals, True)


def _rms_norm_forward(x: Any, weight: Any, *, epsilon: float, save: bool) -> tuple[Any, Any]:
    return _norm(x, weight, None, epsilon, False)


def _rms_norm_vjp(g: Any, residuals: Any, needs: Any, *, epsilon: float) -> tuple[Any, ...]:
    return _norm_vjp(g, residuals, False)[:2]


# --- cross_entropy --------------------------------------------------------------------------------------------------


def _cross_entropy_forward(
    logits: Any, labels: Any, *, pad_id: int, label_smoothing: float, z_loss: float, save: bool
) -> tuple[Any, Any]:
    """Keep the logits themselves: taking their exponentials again costs less than keeping those."""
    rows, wanted = _rows(logits), flat(labels, np.int64)
    losses, kept = np.empty(labels.shape, logits.dtype), np.empty((2, len(rows)), logits.dtype)
    loops().cross_entropy(rows, wanted, pad_id, label_smoothing, z_loss, losses.reshape(-1), kept)
    return losses, (rows, wanted, kept, logits.shape)


def _cross_entropy_vjp(
    g: Any, residuals: Any, needs: Any, *, pad_id: int, label_smoothing: float, z_loss: float
) -> tuple[Any, ...]:
    rows, wanted, kept, shape = residuals
    dlogits = np.empty_like(rows)
    loops().cross_entropy_vjp(flat(g), rows, wanted, kept, pad_id, label_smoothing, z_loss, dlogits)
    return dlogits.reshape(shape), None


# --- adam -----------------------------------------------------------------------------------------------------------


_LEAST_ELEMENTS = 200_000  # some 0.3 ms: what handing a part over must save


def _adam_supports(arrays: tuple[Any, ...], static: dict[str, Any]) -> str | None:
    if any(len({array.shape for array in row}) > 1 for row in rows(arrays[1:])):
        return "the arrays are of several shapes"
    return numpy_optimizer.supports(arrays, static) or compiled(arrays[1:], static)


def _adam(factor: Any, *arrays: Any, keep: Any, save: bool, **settings: float) -> tuple[Any, Any]:
    """Rows are spread over threads, large ones first, where they are worth it."""
    names = ("step_size", "beta1", "beta2", "second_scale", "epsilon")
    numbers, number = [settings[name] for name in names], numpy_optimizer.read(factor)
    if number is None:
        return updated(arrays), None
    of_rows = sorted(zip(rows(arrays), keep, strict=True), key=lambda each: -each[0][0].size)

    def update(each: Any) -> None:
        loops().adam(*numpy_optimizer.elements(each[0]), *numbers, each[1], number)

    if sum(row[0].size for row, _ in of_rows) < _LEAST_ELEMENTS:
        list(map(update, of_rows))
    else:
        parallel_map(update, of_rows)
    return updated(arrays), None


for _operation, _supports, _forward, _vjp in (
    ("gelu", compiled, _gelu_forward, numpy_gelu.vjp),
    ("relu", compiled, _relu_forward, _relu_vjp),
    ("dropout", _dropout_supports, _dropout_forward, _dropout_vjp),
    ("layer_norm", _norm_supports, _layer_norm_forward, _layer_norm_vjp),
    ("rms_norm", _norm_supports, _rms_norm_forward, _rms_norm_vjp),
    ("cross_entropy", compiled, _cross_entropy_forward, _cross_entropy_vjp),
    ("adam", _adam_supports, _adam, None),
):
    register(Kernel(f"numba.{_operation}", _operation, "numpy", _supports, _forward, _vjp, priority=20, kind="jit"))
