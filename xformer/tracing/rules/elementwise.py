"""Derivatives of elementwise functions. `backward` undoes broadcasting, so each rule is the scalar formula."""

from __future__ import annotations

import math
from typing import Any

from xformer.backends import device, is_complex
from xformer.tracing.rule import RULES, decomposition, defvjp, not_differentiable
from xformer.tracing.tracer import COMPARISONS


def conjugate(xp: Any, x: Any) -> Any:
    """Return the complex conjugate of an array of any dtype."""
    return xp.conj(x) if is_complex(x.dtype) else x


def squared_size(xp: Any, x: Any) -> Any:
    """Return the square of the absolute value, a real array."""
    return xp.real(x * xp.conj(x)) if is_complex(x.dtype) else x * x


@decomposition("sign")
def _sign(xp: Any, x: Any, /) -> Any:
    """Return a constant, or the direction of a complex number."""
    if not is_complex(x.dtype):
        return xp.wrap(xp.base.sign(xp.unwrap(x)))
    size = xp.abs(x)
    return x / xp.where(size == 0.0, 1.0, size)


# Functions of one array: g times dy/dx. A complex cotangent of x + iy is that of x minus i times that of y, as in JAX.
# So rules of holomorphic functions are those of real ones.
defvjp("negative", lambda g: -g)
defvjp("positive", lambda g: g)
defvjp("conj", lambda xp, g: conjugate(xp, g))
defvjp("real", lambda g: g)
defvjp("imag", lambda xp, g, x: xp.astype(g, x.dtype) * -1j)
defvjp("abs", lambda xp, g, x: g * conjugate(xp, xp.sign(x)))
defvjp("square", lambda g, x: g * (2.0 * x))
defvjp("sqrt", lambda g, y: g * (0.5 / y))
defvjp("reciprocal", lambda g, y: -g * y * y)
defvjp("exp", lambda g, y: g * y)
defvjp("expm1", lambda g, y: g * (y + 1.0))
defvjp("log", lambda g, x: g / x)
defvjp("log1p", lambda g, x: g / (x + 1.0))
defvjp("log2", lambda g, x: g / (x * math.log(2.0)))
defvjp("log10", lambda g, x: g / (x * math.log(10.0)))
defvjp("sin", lambda xp, g, x: g * xp.cos(x))
defvjp("cos", lambda xp, g, x: -g * xp.sin(x))
defvjp("tan", lambda g, y: g * (1.0 + y * y))
defvjp("asin", lambda xp, g, x: g / xp.sqrt((1.0 - x) * (1.0 + x)))
defvjp("acos", lambda xp, g, x: -g / xp.sqrt((1.0 - x) * (1.0 + x)))
defvjp("atan", lambda g, x: g / (1.0 + x * x))
defvjp("sinh", lambda xp, g, x: g * xp.cosh(x))
defvjp("cosh", lambda xp, g, x: g * xp.sinh(x))
defvjp("tanh", lambda g, y: g * (1.0 - y * y))
defvjp("asinh", lambda xp, g, x: g / (xp.sqrt(x * x + 1.0) if is_complex(x.dtype) else xp.hypot(x, 1.0)))
defvjp("acosh", lambda xp, g, x: g / (xp.sqrt(x - 1.0) * xp.sqrt(x + 1.0)))
defvjp("atanh", lambda g, x: g / ((1.0 - x) * (1.0 + x)))
defvjp("erf", lambda xp, g, x: g * (2.0 / math.sqrt(math.pi)) * xp.exp(-x * x))

# Functions of two arrays: one formula for each. Points without a derivative, such as the origin of hypot, have a finite
# value in its place; see tests/tracing/test_special_points.py.
defvjp("add", lambda g: g, lambda g: g)
defvjp("subtract", lambda g: g, lambda g: -g)
defvjp("multiply", lambda g, b: g * b, lambda g, a: g * a)
defvjp("divide", lambda g, b: g / b, lambda g, b, y: -g * y / b)
defvjp("remainder", lambda g: g, lambda xp, g, a, b: -g * xp.floor_divide(a, b))


def array_like(xp: Any, value: Any, like: Any) -> Any:
    """Convert a Python scalar to an array, since some functions take arrays only."""
    is_number = isinstance(value, int | float | complex)
    return xp.asarray(value, dtype=like.dtype, device=device(like)) if is_number else value


def _unit(xp: Any, g: Any, a: Any, b: Any) -> Any:
    """Return a / hypot(a, b): zero at the origin, and finite where a or b is infinite or the hypotenuse overflows."""
    a, b = array_like(xp, a, g), array_like(xp, b, g)
    is_infinite = xp.isinf(a) | xp.isinf(b)
    a, b = (xp.where(is_infinite, xp.where(xp.isinf(x), xp.sign(x), 0.0), x) for x in (a, b))
    largest = xp.maximum(xp.abs(a), xp.abs(b))
    is_origin = largest == 0.0
    b, largest = xp.where(is_origin, 1.0, b), xp.where(is_origin, 1.0, largest)
    return a / largest / xp.hypot(a / largest, b / largest)


def _angle(xp: Any, g: Any, a: Any, b: Any) -> Any:
    """Return g b / (a^2 + b^2), for atan2, without squares that overflow; zero at the origin."""
    radius = xp.hypot(a, b)
    return g * _unit(xp, g, b, a) / xp.where(radius == 0.0, 1.0, radius)


def _share(xp: Any, g: Any, a: Any, b: Any) -> Any:
    """Return g / (1 + exp(b - a)), for logaddexp; one half for equal infinities."""
    a, b = array_like(xp, a, g), array_like(xp, b, g)
    is_same = xp.isinf(a) & (a == b)
    difference = xp.where(is_same, 0.0, b) - xp.where(is_same, 0.0, a)
    return g * xp.exp(-xp.logaddexp(0.0, difference))


defvjp("hypot", lambda xp, g, a, b: g * _unit(xp, g, a, b), lambda xp, g, a, b: g * _unit(xp, g, b, a))
defvjp("atan2", _angle, lambda xp, g, a, b: -_angle(xp, g, b, a))
defvjp("logaddexp", _share, lambda xp, g, a, b: _share(xp, g, b, a))


def _pow_base(xp: Any, g: Any, a: Any, b: Any) -> Any:
    """d(a^b)/da = b a^(b-1); zero where b is zero, also at a = 0, and where an infinite b makes the power zero."""
    if isinstance(b, int | float) and math.isfinite(b):
        return xp.zeros_like(g) if b == 0 else g * (b * a ** (b - 1))
    b = array_like(xp, b, g)
    power = a ** xp.where(b == 0, 0.0, b - 1.0)
    return g * xp.where(xp.isinf(b) & (power == 0), 0.0, b) * power


def _pow_exponent(xp: Any, g: Any, a: Any, b: Any, y: Any) -> Any:
    """d(a^b)/db = a^b log(a); zero where the power is zero, at 0^0, and by convention where a is negative."""
    a = array_like(xp, a, y)
    is_zero = (y == 0) | ((a == 0) & (b == 0))
    is_zero = is_zero if is_complex(a.dtype) else is_zero | (a < 0)
    return g * xp.where(is_zero, 0.0, y) * xp.log(xp.where(is_zero, 1.0, a))


defvjp("pow", _pow_base, _pow_exponent)


def _selected(xp: Any, g: Any, x: Any, other: Any, y: Any) -> Any:
    """Return the cotangent of an input x of maximum or minimum: g where x was selected, one half of it for ties."""
    x, other = array_like(xp, x, y), array_like(xp, other, y)
    return xp.where(x == y, xp.where(other == y, 0.5 * g, g), 0.0)


for _name in ("maximum", "minimum"):
    defvjp(_name, lambda xp, g, a, b, y: _selected(xp, g, a, b, y), lambda xp, g, a, b, y: _selected(xp, g, b, a, y))


defvjp("copysign", lambda xp, g, a, y: g * xp.sign(a) * xp.sign(y), lambda xp, g: xp.zeros_like(g))
defvjp("nextafter", lambda g: g, lambda xp, g: xp.zeros_like(g))

# where(condition, a, b): each side gets the cotangent where it was chosen.
defvjp(
    "where",
    lambda xp, g, condition: xp.where(condition, g, 0.0),
    lambda xp, g, condition: xp.where(condition, 0.0, g),
    positions=(1, 2),
)


@decomposition("clip")
def _clip(xp: Any, x: Any, /, min: Any = None, max: Any = None) -> Any:
    """Decompose clip into maximum and minimum, so that bounds may be traced; the result is always a new array."""
    if min is None and max is None:
        return xp.asarray(x, copy=True) if x.ndim else xp.asarray(x, copy=True)[()]  # NumPy returns a number
    for bound, choose in ((min, xp.maximum), (max, xp.minimum)):
        if bound is not None:
            bound = xp.asarray(bound, dtype=x.dtype, device=device(x)) if isinstance(bound, int | float) else bound
            x = xp.astype(choose(x, bound), x.dtype, copy=False)
    return x


ELEMENTWISE = {*RULES, "clip", "sign"}  # so far: the functions of this file


# Functions without a derivative: creation, comparison, rounding, searching, and everything on integers.

ELEMENTWISE_CONSTANTS = (
    # comparison and logic
    *("equal", "not_equal", "less", "less_equal", "greater", "greater_equal", "isfinite", "isinf", "isnan"),
    *("logical_and", "logical_or", "logical_not", "logical_xor", "signbit"),
    # integers
    *("bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_invert", "bitwise_left_shift", "bitwise_right_shift"),
    # steps: locally constant, so their derivative is zero wherever it exists
    *("ceil", "floor", "round", "trunc", "floor_divide"),
    # the operators of these
    *(f"operator_{name}" for name in (*COMPARISONS, "floordiv", "and", "or", "xor", "lshift", "rshift", "invert")),
)

not_differentiable(
    *ELEMENTWISE_CONSTANTS,
    *(f"inplace_{name}" for name in ("floordiv", "and", "or", "xor", "lshift", "rshift")),
    # creation; those from numbers (arange, full, linspace) are not here: on a tracked number they must raise
    *("empty", "empty_like", "eye", "ones", "ones_like", "zeros", "zeros_like"),
    # searching and counting
    *("all", "any", "argmax", "argmin", "argsort", "nonzero", "count_nonzero", "searchsorted", "isin"),
    # facts about dtypes and shapes
    *("broadcast_shapes", "can_cast", "finfo", "iinfo", "isdtype", "result_type", "__array_namespace_info__"),
)
