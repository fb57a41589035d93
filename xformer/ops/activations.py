"""Activation functions of the feed-forward layer."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from xformer.backends import Array, array_namespace, extra
from xformer.errors import ConfigError
from xformer.ops.operation import Operation

_SIGNATURE = "x: (...) float -> (...)"


def relu_forward(x: Array, *, save: bool) -> tuple[Array, Any]:
    """Return max(x, 0), which is also the residual."""
    xp = array_namespace(x)
    y = xp.where(x < 0, xp.zeros_like(x), x)  # in this order, NaN propagates
    return y, y


def relu_vjp(g: Array, y: Any, needs: Any) -> tuple[Any, ...]:
    """Return g where y = relu(x) is positive, else zero."""
    xp = array_namespace(g, y)
    return (xp.where(y > 0, g, xp.zeros_like(g)),)


_relu = Operation("relu", _SIGNATURE, relu_forward, relu_vjp)


def relu(x: Array) -> Array:
    """Compute max(x, 0); the derivative at zero is zero.

    Args:
        x: Array of any shape, floating.

    Returns:
        Array of the same shape and dtype.
    """
    return _relu(x)


def relu_squared(x: Array) -> Array:
    """Compute max(x, 0)^2 (So et al., 2021, section 3).

    Args:
        x: Array of any shape, floating.

    Returns:
        Array of the same shape and dtype.
    """
    y = relu(x)
    return y * y


_MAX_ABS = 40.0  # beyond, the tail of the normal distribution is zero in float64


def _gelu_forward(x: Array, *, save: bool) -> tuple[Array, Any]:
    xp = array_namespace(x)
    clipped = xp.where(x < -_MAX_ABS, xp.zeros_like(x), x)  # minus infinity times zero would be NaN
    return 0.5 * clipped * (1.0 + extra.erf(x * math.sqrt(0.5))), x


def _gelu_vjp(g: Array, x: Any, needs: Any) -> tuple[Any, ...]:
    """With Phi the normal distribution function and phi its density: dx = g (Phi(x) + x phi(x))."""
    xp = array_namespace(g, x)
    clipped = xp.where(xp.abs(x) < _MAX_ABS, x, xp.zeros_like(x))  # infinity times zero would be NaN
    density = xp.exp(-0.5 * clipped * clipped) * (1.0 / math.sqrt(2.0 * math.pi))
    return (g * (0.5 * (1.0 + extra.erf(x * math.sqrt(0.5))) + clipped * density),)


_gelu = Operation("gelu", _SIGNATURE, _gelu_forward, _gelu_vjp, compute_in_float32=True)


def gelu(x: Array) -> Array:
    """Compute GELU, x Phi(x) with Phi the normal distribution function (Hendrycks and Gimpel, 2016).

    Args:
        x: Array of any shape, floating.

    Returns:
        Array of the same shape and dtype.
    """
    return _gelu(x)


# Both have the form x s(z), with s the logistic function. Beyond the limit, s is 0 or 1, and its derivative 0; infinity
# times zero would be NaN.
_LIMIT = 80.0


def logistic(z: Array) -> Array:
    """Compute the logistic function by tanh, which does not overflow."""
    return 0.5 * (1.0 + array_namespace(z).tanh(0.5 * z))


def _clip(x: Array) -> Array:
    return array_namespace(x).clip(x, min=-_LIMIT, max=_LIMIT)


def _above_minus_limit(x: Array) -> Array:
    xp = array_namespace(x)
    return xp.where(x < -_LIMIT, xp.zeros_like(x), x)


SCALE, CUBIC = 2.0 * math.sqrt(2.0 / math.pi), 0.044715


def _gelu_tanh_forward(x: Array, *, save: bool) -> tuple[Array, Any]:
    c = _clip(x)
    return _above_minus_limit(x) * logistic(SCALE * (c + CUBIC * c * c * c)), x


def _gelu_tanh_vjp(g: Array, x: Any, needs: Any) -> tuple[Any, ...]:
    """With y = x s(z): dx = g (s + x s (1 - s) z')."""
    x = _clip(x)
    s = logistic(SCALE * (x + CUBIC * x * x * x))
    return (g * (s + x * s * (1.0 - s) * (SCALE * (1.0 + 3.0 * CUBIC * x * x))),)


_gelu_tanh = Operation("gelu_tanh", _SIGNATURE, _gelu_tanh_forward, _gelu_tanh_vjp, compute_in_float32=True)


def gelu_tanh(x: Array) -> Array:
    """Compute the tanh approximation of GELU (Hendrycks and Gimpel, 2016, section 2).

    Args:
        x: Array of any shape, floating.

    Returns:
        Array of the same shape and dtype.
    """
    return _gelu_tanh(x)


def _silu_forward(x: Array, *, save: bool) -> tuple[Array, Any]:
    return _above_minus_limit(x) * logistic(_clip(x)), x


def _silu_vjp(g: Array, x: Any, needs: Any) -> tuple[Any, ...]:
    """With y = x s(x): dx = g (s + x s (1 - s))."""
    x = _clip(x)
    s = logistic(x)
    return (g * (s + x * s * (1.0 - s)),)


_silu = Operation("silu", _SIGNATURE, _silu_forward, _silu_vjp, compute_in_float32=True)


def silu(x: Array) -> Array:
    """Compute SiLU, x times the logistic function of x, also known as swish (Elfwing et al., 2018).

    Args:
        x: Array of any shape, floating.

    Returns:
        Array of the same shape and dtype.
    """
    return _silu(x)


_QUICK = 1.702  # x s(1.702 x), with s the logistic function, is close to GELU


def quick_gelu(x: Array) -> Array:
    """Compute the sigmoid approximation of GELU (Hendrycks and Gimpel, 2016, section 2), as CLIP does.

    Args:
        x: Array of any shape, floating.

    Returns:
        Array of the same shape and dtype.
    """
    return extra.cast_like(silu(x * _QUICK) * (1.0 / _QUICK), x)


ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "relu": relu,
    "gelu": gelu,
    "gelu_tanh": gelu_tanh,
    "silu": silu,
    "relu_squared": relu_squared,
    "quick_gelu": quick_gelu,
}


def activation(name: str) -> Callable[[Array], Array]:
    """Return an activation function by name.

    Args:
        name: "relu", "gelu", "gelu_tanh", "silu", "relu_squared" or "quick_gelu".

    Returns:
        The function of one array.

    Raises:
        ConfigError: If the name is unknown.
    """
    if not isinstance(name, str) or name not in ACTIVATIONS:
        raise ConfigError(f"activation is {name!r}; expected one of {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]
