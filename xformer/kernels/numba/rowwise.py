"""Elementwise and rowwise operations on NumPy, compiled by numba."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from xformer.backends.recording import contiguous, empty
from xformer.kernels.numba import arrays as numba_arrays
from xformer.kernels.numba.arrays import EMPTY_1D, flatten, import_kernels
from xformer.kernels.numpy import gelu as numpy_gelu
from xformer.kernels.numpy import optimizer as numpy_optimizer
from xformer.kernels.registry import Kernel, register
from xformer.ops.activations import CUBIC, SCALE
from xformer.ops.adam import Settings, slots, updated, writable
from xformer.ops.linear import as_rows
from xformer.threads import parallel_map


def _kernels() -> Any:
    return import_kernels("rowwise_kernels")


def _contiguous_rows(x: Any) -> Any:
    return contiguous(as_rows(x))


# --- elementwise ----------------------------------------------------------------------------------------------------

_COEFFICIENTS = np.asarray(numpy_gelu.COEFFICIENTS, np.float32)


def _gelu_forward(x: Any, *, save: bool) -> tuple[Any, Any]:
    y = empty(x.shape, x.dtype)
    slope = np.empty_like(y) if save else EMPTY_1D
    _kernels().gelu(flatten(x), _COEFFICIENTS, numpy_gelu.P, y.reshape(-1), slope.reshape(-1))
    return y, slope


def _logistic_unit_forward(x: Any, *, save: bool, scale: float, cubic: float) -> tuple[Any, Any]:
    y = empty(x.shape, x.dtype)
    slope = np.empty_like(y) if save else EMPTY_1D
    _kernels().logistic_unit(flatten(x), scale, cubic, y.reshape(-1), slope.reshape(-1))
    return y, slope


def _relu_forward(x: Any, *, save: bool) -> tuple[Any, Any]:
    y = empty(x.shape, x.dtype)
    _kernels().relu(flatten(x), y.reshape(-1))
    return y, y


def _relu_vjp(g: Any, y: Any, needs: Any) -> tuple[Any, ...]:
    dx = empty(g.shape, g.dtype)
    _kernels().relu_vjp(flatten(g), flatten(y), dx.reshape(-1))
    return (dx,)


def _dropout_forward(x: Any, mask: Any, *, keep_probability: float, save: bool) -> tuple[Any, Any]:
    y = empty(x.shape, x.dtype)
    _kernels().dropout(flatten(x), flatten(mask, bool), 1.0 / keep_probability, y.reshape(-1))
    return y, mask


def _dropout_vjp(g: Any, mask: Any, needs: Any, *, keep_probability: float) -> tuple[Any, ...]:
    return _dropout_forward(g, mask, keep_probability=keep_probability, save=False)[0], None


def _dropout_supports(arrays: tuple[Any, ...], static: dict[str, Any]) -> str | None:
    x, mask = arrays
    return numba_arrays.supports(arrays, static) if x.shape == mask.shape else "the mask is broadcast"


def _rotate_forward(x: Any, cosine: Any, sine: Any, *, save: bool) -> tuple[Any, Any]:
    y = empty(x.shape, x.dtype)
    shape = (x.shape[0] * x.shape[1], *x.shape[2:])
    _kernels().rotate(contiguous(x).reshape(shape), contiguous(cosine), contiguous(sine), y.reshape(shape))
    return y, (cosine, sine)


def _rotate_vjp(g: Any, residuals: Any, needs: Any) -> tuple[Any, ...]:
    cosine, sine = residuals
    return _rotate_forward(g, cosine, -sine, save=False)[0], None, None


def _rotate_supports(arrays: tuple[Any, ...], static: dict[str, Any]) -> str | None:
    x, cosine, sine = arrays
    if x.ndim != 4 or not x.shape[2:3] + sine.shape[1:] == cosine.shape == sine.shape:
        return f"angles of shape {cosine.shape} for an array of shape {x.shape}"
    return numba_arrays.supports(arrays, static)


# --- norms ----------------------------------------------------------------------------------------------------------


def _norm_supports(arrays: tuple[Any, ...], static: dict[str, Any]) -> str | None:
    x, *parameters = arrays
    if any(array is not None and array.shape != x.shape[-1:] for array in parameters):
        return "weight or bias is broadcast"
    return numba_arrays.supports(arrays, static)


def _norm(x: Any, weight: Any, bias: Any = None, *, epsilon: float, save: bool, centered: bool) -> tuple[Any, Any]:
    x_rows, weight = _contiguous_rows(x), flatten(weight)
    y, statistics = np.empty_like(x_rows), empty((2, len(x_rows)), x.dtype)
    bias = EMPTY_1D if bias is None else flatten(bias)
    _kernels().norm(x_rows, weight, bias, epsilon, centered, y, statistics)
    return y.reshape(x.shape), (x_rows, weight, statistics)


def _norm_vjp(g: Any, residuals: Any, needs: Any, *, epsilon: float, centered: bool) -> tuple[Any, ...]:
    x_rows, weight, statistics = residuals
    dx, dweight, dbias = np.empty_like(x_rows), np.zeros_like(weight), np.zeros_like(weight)
    _kernels().norm_vjp(_contiguous_rows(g), x_rows, weight, statistics, centered, dx, dweight, dbias)
    return (dx.reshape(g.shape), dweight, dbias)[: len(needs)]


# --- cross-entropy --------------------------------------------------------------------------------------------------


def _cross_entropy_forward(
    logits: Any, labels: Any, *, pad_id: int, label_smoothing: float, z_loss: float, save: bool
) -> tuple[Any, Any]:
    """Save the logits: computing their exponentials again takes less time than storing them."""
    logit_rows, ids = _contiguous_rows(logits), flatten(labels, np.int64)
    losses, statistics = empty(labels.shape, logits.dtype), empty((2, len(logit_rows)), logits.dtype)
    _kernels().cross_entropy(logit_rows, ids, pad_id, label_smoothing, z_loss, losses.reshape(-1), statistics)
    return losses, (logit_rows, ids, statistics, logits.shape)


def _cross_entropy_vjp(
    g: Any, residuals: Any, needs: Any, *, pad_id: int, label_smoothing: float, z_loss: float
) -> tuple[Any, ...]:
    logit_rows, ids, statistics, shape = residuals
    dlogits = np.empty_like(logit_rows)
    _kernels().cross_entropy_vjp(flatten(g), logit_rows, ids, statistics, pad_id, label_smoothing, z_loss, dlogits)
    return dlogits.reshape(shape), None


# --- adam -----------------------------------------------------------------------------------------------------------

_MIN_ELEMENTS = 200_000  # about 0.3 ms; below, starting threads costs more than it saves


def _adam_supports(arrays: tuple[Any, ...], static: dict[str, Any]) -> str | None:
    if any(len({array.shape for array in slot}) > 1 for slot in slots(arrays[1:])):
        return "the arrays have different shapes"
    return numpy_optimizer.supports(arrays, static) or numba_arrays.supports(arrays[1:], static)


def _adam(
    grad_scale: Any, *arrays: Any, settings: Settings, weight_decay: Any, donate: bool, save: bool
) -> tuple[Any, Any]:
    """Update large parameters first, on several threads if that pays off."""
    arrays, settings = tuple(writable(arrays, donate)), Settings(*map(float, settings))
    scale = numpy_optimizer.read_grad_scale(grad_scale)
    if scale is None:
        return updated(arrays), None
    items = sorted(zip(slots(arrays), weight_decay, strict=True), key=lambda item: -item[0][0].size)

    def update(item: Any) -> None:
        slot, rate = item
        _kernels().adam(*numpy_optimizer.elements(slot), *settings[:5], settings.decay(rate), scale)

    if sum(slot[0].size for slot, _ in items) < _MIN_ELEMENTS:
        list(map(update, items))
    else:
        parallel_map(update, items)
    return updated(arrays), None


for _operation, _supports, _forward, _vjp in (
    ("gelu", numba_arrays.supports, _gelu_forward, numpy_gelu.vjp),
    ("gelu_tanh", numba_arrays.supports, partial(_logistic_unit_forward, scale=SCALE, cubic=CUBIC), numpy_gelu.vjp),
    ("silu", numba_arrays.supports, partial(_logistic_unit_forward, scale=1.0, cubic=0.0), numpy_gelu.vjp),
    ("relu", numba_arrays.supports, _relu_forward, _relu_vjp),
    ("dropout", _dropout_supports, _dropout_forward, _dropout_vjp),
    ("rotate", _rotate_supports, _rotate_forward, _rotate_vjp),
    ("layer_norm", _norm_supports, partial(_norm, centered=True), partial(_norm_vjp, centered=True)),
    ("rms_norm", _norm_supports, partial(_norm, centered=False), partial(_norm_vjp, centered=False)),
    ("cross_entropy", numba_arrays.supports, _cross_entropy_forward, _cross_entropy_vjp),
    ("adam", _adam_supports, _adam, None),
):
    register(
        Kernel(
            f"numba.{_operation}",
            _operation,
            "numpy",
            _supports,
            _forward,
            _vjp,
            priority=20,
            disabled_by="no-jit",
            is_recordable=_operation != "adam",
        )
    )
