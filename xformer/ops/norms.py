"""Layer normalization (Ba, Kiros and Hinton, 2016) and root mean square normalization (Zhang and Sennrich, 2019)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from xformer.backends import Array, accumulation_dtype, array_namespace
from xformer.ops.operation import FINITE, Operation


def upcast_rows(x: Array) -> tuple[Array, Array | None]:
    """Return the rows in float32 or wider, and their scale (..., 1), or None for rows that are not scaled.

    float16 and bfloat16 rows are scaled so that their squares do not overflow. The norm of scaled rows equals that of
    the rows if epsilon is multiplied by the square of the scale.
    """
    xp = array_namespace(x)
    dtype = accumulation_dtype(xp, x.dtype)
    if dtype == x.dtype:
        return x, None
    wide = xp.astype(x, dtype)
    scale = 1.0 / xp.clip(xp.max(xp.abs(wide), axis=-1, keepdims=True), min=1.0)
    return wide * scale, scale


def _normalize(x: Array, weight: Array, bias: Array | None, epsilon: float, centered: bool) -> tuple[Array, Any]:
    xp = array_namespace(x, weight)
    wide, scale = upcast_rows(x)
    if centered:
        wide = wide - xp.mean(wide, axis=-1, keepdims=True)
    mean_square = xp.mean(wide * wide, axis=-1, keepdims=True)
    inverse = 1.0 / xp.sqrt(mean_square + (epsilon if scale is None else epsilon * scale * scale))
    normalized = wide * inverse
    y = normalized * weight
    y = y if bias is None else y + bias
    return xp.astype(y, x.dtype, copy=False), (normalized, inverse, scale, weight)


def _normalize_vjp(g: Array, residuals: Any, needs: Any, *, centered: bool, addend: Any = None) -> tuple[Any, ...]:
    """With x^ the normalized rows and h = g weight: dx = (h - mean(h) - x^ mean(h x^)) / sigma.

    For RMS norm, the term mean(h) is absent and sigma is the root mean square. `addend` is added to dx.
    """
    normalized, inverse, scale, weight = residuals
    xp = array_namespace(g, normalized, weight)
    g = xp.astype(g, normalized.dtype, copy=False)
    h = g * weight
    mean_h = xp.mean(h, axis=-1, keepdims=True) if centered else 0.0
    dx = inverse * (h - mean_h - normalized * xp.mean(h * normalized, axis=-1, keepdims=True))
    dx = dx if scale is None else dx * scale
    dx = dx if addend is None else dx + xp.astype(addend, dx.dtype, copy=False)
    # The backward pass sums the cotangents of weight and bias over all rows.
    return (dx, g * normalized if needs[1] else None, g)[: len(needs)]


def _add_norm_forward(
    x: Array, y: Array, weight: Array, bias: Array | None, *, epsilon: float, centered: bool, keep_sum: bool, save: bool
) -> tuple[Any, Any]:
    total = array_namespace(x, y).add(x, y)
    normalized, residuals = _normalize(total, weight, bias, epsilon, centered)
    return (total, normalized) if keep_sum else normalized, residuals


def add_norm_vjp(
    norm_vjp: Callable[..., Any], g: Any, residuals: Any, needs: Any, *, centered: bool, keep_sum: bool, **options: Any
) -> tuple[Any, ...]:
    """Compute the cotangents of `add_norm` by those of a norm, to which the cotangent of the sum is added."""
    g_sum, g = g if keep_sum else (None, g)
    if g is None:
        return g_sum, g_sum, None, None
    dx, *dparameters = norm_vjp(g, residuals, (True, *needs[2:]), centered=centered, addend=g_sum)
    return dx, dx, *dparameters


_CONDITIONS = {"at least one feature": lambda sizes: sizes["features"] > 0}
_RANGES = {"epsilon": (0.0, FINITE[1])}
_layer_norm = Operation(
    "layer_norm",
    "x: (..., features) float, weight: (features) float, bias?: (features) float -> (..., features)",
    lambda x, weight, bias, *, epsilon, save: _normalize(x, weight, bias, epsilon, centered=True),
    lambda g, residuals, needs, *, epsilon: _normalize_vjp(g, residuals, needs, centered=True),
    conditions=_CONDITIONS,
    ranges=_RANGES,
)
_rms_norm = Operation(
    "rms_norm",
    "x: (..., features) float, weight: (features) float -> (..., features)",
    lambda x, weight, *, epsilon, save: _normalize(x, weight, None, epsilon, centered=False),
    lambda g, residuals, needs, *, epsilon: _normalize_vjp(g, residuals, needs, centered=False),
    conditions=_CONDITIONS,
    ranges=_RANGES,
)
_add_norm = Operation(
    "add_norm",
    "x: (..., features) float, y: (..., features) float, weight: (features) float, bias?: (features) float "
    "-> (..., features)",
    _add_norm_forward,
    functools.partial(add_norm_vjp, _normalize_vjp),
    conditions=_CONDITIONS,
    ranges=_RANGES,
)


def layer_norm(x: Array, weight: Array, bias: Array | None, *, epsilon: float = 1e-5) -> Array:
    """Normalize rows to mean 0 and variance 1, then multiply by `weight` and add `bias`.

    y = (x - mean(x)) / sqrt(var(x) + epsilon) * weight + bias (section 3), with the biased variance (divided by the
    number of features). float16 and bfloat16 are normalized in float32.

    Args:
        x: Array of shape (..., features).
        weight: Array of shape (features,).
        bias: Array of shape (features,), or None.
        epsilon: Added to the variance.

    Returns:
        Array of the shape and dtype of x.

    Raises:
        ShapeError: If shapes or dtypes do not match.
        ConfigError: If epsilon is not a number of at least 0.
    """
    return _layer_norm(x, weight, bias, epsilon=epsilon)


def rms_norm(x: Array, weight: Array, *, epsilon: float = 1e-5) -> Array:
    """Divide rows by their root mean square, then multiply by `weight`.

    y = x / sqrt(mean(x^2) + epsilon) * weight (section 4). float16 and bfloat16 are normalized in float32.

    Args:
        x: Array of shape (..., features).
        weight: Array of shape (features,).
        epsilon: Added to the mean square.

    Returns:
        Array of the shape and dtype of x.

    Raises:
        ShapeError: If shapes or dtypes do not match.
        ConfigError: If epsilon is not a number of at least 0.
    """
    return _rms_norm(x, weight, epsilon=epsilon)


def fuses_add_norm(x: Array) -> bool:
    """Return whether the library of x has a kernel that adds and normalizes in one pass."""
    library = array_namespace(x).library
    kernels = library.kernels.get("add_norm")
    return bool(_add_norm.enable_kernels(library) if kernels is None else kernels)


def add_norm(
    x: Array, y: Array, weight: Array, bias: Array | None, *, epsilon: float, centered: bool, keep_sum: bool = True
) -> Any:
    """Compute x + y and its layer norm, or with centered=False its RMS norm.

    Args:
        x: Array of shape (..., features).
        y: Array of the same shape and dtype.
        weight: Array of shape (features,).
        bias: Array of shape (features,), or None.
        epsilon: As for the norms.
        centered: Whether to subtract the mean.
        keep_sum: Whether to return the sum.

    Returns:
        The sum and its norm; without keep_sum the norm.
    """
    return _add_norm(x, y, weight, bias, epsilon=epsilon, centered=centered, keep_sum=keep_sum)
