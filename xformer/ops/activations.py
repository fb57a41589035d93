"""Activation functions of the feed-forward layer, and dropout."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

from xformer.backends import Array, array_namespace, extra
from xformer.config import check_number
from xformer.errors import check_choice
from xformer.ops.operation import OPERATIONS, Operation, Signature

Activation = Literal["relu", "gelu", "gelu_tanh", "silu", "relu_squared", "quick_gelu"]
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


def _relu_squared_forward(x: Array, *, save: bool) -> tuple[Array, Any]:
    y = relu(x)
    return y * y, y


_relu_squared = Operation("relu_squared", _SIGNATURE, _relu_squared_forward, lambda g, y, needs: (2.0 * g * y,))


def relu_squared(x: Array) -> Array:
    """Compute max(x, 0)^2 (So et al., 2021, section 3).

    Args:
        x: Array of any shape, floating.

    Returns:
        Array of the same shape and dtype.
    """
    return _relu_squared(x)


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


# The others have the form x s(z), with s the logistic function. Beyond the limit, s is 0 or 1, and its derivative 0;
# infinity times zero would be NaN.
_LIMIT = 80.0


def logistic(z: Array) -> Array:
    """Compute the logistic function by tanh, which does not overflow."""
    return 0.5 * (1.0 + array_namespace(z).tanh(0.5 * z))


def _clip(x: Array) -> Array:
    return array_namespace(x).clip(x, min=-_LIMIT, max=_LIMIT)


def _above_minus_limit(x: Array) -> Array:
    xp = array_namespace(x)
    return xp.where(x < -_LIMIT, xp.zeros_like(x), x)


def _logistic_unit(name: str, argument: Callable[[Array], Array], x_slope: Callable[[Array], Array]) -> Operation:
    """Return the operation x s(z), where `argument` computes z of x, and `x_slope` x z'."""

    def forward(x: Array, *, save: bool) -> tuple[Array, Any]:
        return _above_minus_limit(x) * logistic(argument(_clip(x))), x

    def vjp(g: Array, x: Any, needs: Any) -> tuple[Any, ...]:
        """With y = x s(z): dx = g (s + x z' s (1 - s))."""
        x = _clip(x)
        s = logistic(argument(x))
        return (g * (s + s * (1.0 - s) * x_slope(x)),)

    return Operation(name, _SIGNATURE, forward, vjp, compute_in_float32=True)


SCALE, CUBIC = 2.0 * math.sqrt(2.0 / math.pi), 0.044715
QUICK = 1.702  # x s(1.702 x) is close to GELU

_gelu_tanh = _logistic_unit(
    "gelu_tanh",
    lambda x: SCALE * (x + CUBIC * x * x * x),
    lambda x: SCALE * (x + 3.0 * CUBIC * x * x * x),
)
_silu = _logistic_unit("silu", lambda x: x, lambda x: x)
_quick_gelu = _logistic_unit("quick_gelu", lambda x: QUICK * x, lambda x: QUICK * x)


def gelu_tanh(x: Array) -> Array:
    """Compute the tanh approximation of GELU (Hendrycks and Gimpel, 2016, section 2).

    Args:
        x: Array of any shape, floating.

    Returns:
        Array of the same shape and dtype.
    """
    return _gelu_tanh(x)


def silu(x: Array) -> Array:
    """Compute SiLU, x times the logistic function of x, also known as swish (Elfwing et al., 2018).

    Args:
        x: Array of any shape, floating.

    Returns:
        Array of the same shape and dtype.
    """
    return _silu(x)


def quick_gelu(x: Array) -> Array:
    """Compute the sigmoid approximation of GELU (Hendrycks and Gimpel, 2016, section 2), as CLIP does.

    Args:
        x: Array of any shape, floating.

    Returns:
        Array of the same shape and dtype.
    """
    return _quick_gelu(x)


_FUNCTIONS = relu, gelu, gelu_tanh, silu, relu_squared, quick_gelu
ACTIVATIONS: dict[str, Callable[[Array], Array]] = {function.__name__: function for function in _FUNCTIONS}


def activation(name: Activation) -> Callable[[Array], Array]:
    """Return an activation function by name.

    Args:
        name: "relu", "gelu", "gelu_tanh", "silu", "relu_squared" or "quick_gelu".

    Returns:
        The function of one array.

    Raises:
        ConfigError: If the name is unknown.
    """
    check_choice("activation", name, ACTIVATIONS)
    return ACTIVATIONS[name]


# --- gated units ------------------------------------------------------------------------------------------------------


def _gated_forward(gate: Array, up: Array, *, activation: str, save: bool) -> tuple[Array, Any]:
    operation = OPERATIONS[activation]
    kernel = operation.select(array_namespace(gate, up), (gate,), {}, operation.check(gate), save=save)
    y, residuals = kernel.forward(gate, save=save)
    return y * up, (kernel.vjp, residuals, y, up)


def _gated_vjp(g: Array, saved: Any, needs: Any, *, activation: str) -> tuple[Any, ...]:
    vjp, residuals, y, up = saved
    return vjp(g * up, residuals, needs[:1])[0] if needs[0] else None, g * y if needs[1] else None


_gated = Operation(
    "gated", "gate: (...) float, up: (...) float -> (...)", _gated_forward, _gated_vjp, compute_in_float32=True
)


def gated(gate: Array, up: Array, activation: Activation) -> Array:
    """Compute activation(gate) * up, the gated unit of Shazeer (2020).

    Args:
        gate: Array of any shape, floating.
        up: Array of the same shape.
        activation: Name of an activation function.

    Returns:
        Array of the same shape.
    """
    return _gated(gate, up, activation=activation)


# --- Dropout with a mask as argument (Srivastava et al., 2014) --------------------------------------------------------


def apply_dropout(x: Array, mask: Array, keep_probability: float) -> Array:
    """Return x / keep_probability where the mask is True, else zero."""
    xp = array_namespace(x)
    return xp.where(mask, extra.cast_like(x * (1.0 / keep_probability), x), xp.zeros_like(x))


def _dropout_forward(x: Array, mask: Array, *, keep_probability: float, save: bool) -> tuple[Array, Any]:
    return apply_dropout(x, mask, keep_probability), mask


def _dropout_vjp(g: Array, mask: Any, needs: Any, *, keep_probability: float) -> tuple[Any, ...]:
    return apply_dropout(g, mask, keep_probability), None


_dropout = Operation("dropout", "x: (...) float, mask: (...) bool -> (...)", _dropout_forward, _dropout_vjp)

_MASK = Signature("x: (...) float, mask: ~(...) bool", {})


def dropout(x: Array, mask: Array, keep_probability: float) -> Array:
    """Set elements to zero where the mask is False, and divide the others by `keep_probability`.

    The mask is an argument, so the operation itself is not random.

    Args:
        x: Array of any shape, floating.
        mask: Boolean array that broadcasts to x, True = keep.
        keep_probability: Probability with which the mask was drawn.

    Returns:
        Array of the shape and dtype of x.

    Raises:
        ShapeError: If shapes or dtypes do not match.
    """
    check_number("keep_probability", keep_probability, above=0, at_most=1)
    if getattr(mask, "shape", None) != getattr(x, "shape", None):
        _MASK.check("dropout", (x, mask))
        mask = array_namespace(mask).broadcast_to(mask, x.shape)
    return _dropout(x, mask, keep_probability=keep_probability)
