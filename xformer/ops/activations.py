"""Activation functions of the feed-forward layer."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from xformer.autodiff import Implementation
from xformer.backends import Array, array_namespace, extra
from xformer.errors import ConfigError
from xformer.ops.operation import Operation


def relu_forward(x: Array, *, save: bool) -> tuple[Array, Any]:
    """The positive part, which is all that the derivative needs."""
    xp = array_namespace(x)
    y = xp.where(x < 0, xp.zeros_like(x), x)  # this way round, NaN stays visible
    return y, y


def relu_vjp(g: Array, y: Any, needs: Any) -> tuple[Any, ...]:
    """g where y, what the forward returned, is positive."""
    xp = array_namespace(g, y)
    return (xp.where(y > 0, g, xp.zeros_like(g)),)


_relu = Operation(Implementation("relu", relu_forward, relu_vjp))


def relu(x: Array) -> Array:
    """max(x, 0), with derivative zero at zero."""
    return _relu(x)


_FLAT = 40.0  # the normal distribution's tail beyond it is zero in float64


def _gelu_forward(x: Array, *, save: bool) -> tuple[Array, Any]:
    xp = array_namespace(x)
    tailed = xp.where(x < -_FLAT, xp.zeros_like(x), x)  # minus infinity times zero would be NaN
    return 0.5 * tailed * (1.0 + extra.erf(x * math.sqrt(0.5))), x


def _gelu_vjp(g: Array, x: Any, needs: Any) -> tuple[Any, ...]:
    """With Phi and phi the normal distribution function and its density: dx = g (Phi(x) + x phi(x))."""
    xp = array_namespace(g, x)
    near = xp.where(xp.abs(x) < _FLAT, x, xp.zeros_like(x))  # infinity times zero would be NaN
    density = xp.exp(-0.5 * near * near) * (1.0 / math.sqrt(2.0 * math.pi))
    return (g * (0.5 * (1.0 + extra.erf(x * math.sqrt(0.5))) + near * density),)


_gelu = Operation(Implementation("gelu", _gelu_forward, _gelu_vjp), compute_in_float32=True)


def gelu(x: Array) -> Array:
    """x times the normal distribution function of x, exactly, through erf (Hendrycks and Gimpel, 2016)."""
    return _gelu(x)


def gelu_tanh(x: Array) -> Array:
    """The tanh approximation of GELU (Hendrycks and Gimpel, 2016, section 2)."""
    xp = array_namespace(x)
    return extra.cast_like(0.5 * x * (1.0 + xp.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x * x * x))), x)


def silu(x: Array) -> Array:
    """x times the logistic function of x (Elfwing et al., 2018), also known as swish."""
    xp = array_namespace(x)
    # 1 / (1 + exp(-x)) through tanh, which overflows nowhere.
    return extra.cast_like(0.5 * x * (1.0 + xp.tanh(0.5 * x)), x)


ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "relu": relu,
    "gelu": gelu,
    "gelu_tanh": gelu_tanh,
    "silu": silu,
}


def activation(name: str) -> Callable[[Array], Array]:
    """Return the activation function of that name; raises ConfigError for an unknown one."""
    if not isinstance(name, str) or name not in ACTIVATIONS:
        raise ConfigError(f"activation is {name!r}; expected one of {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]
