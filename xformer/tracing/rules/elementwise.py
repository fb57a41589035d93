"""Derivatives of elementwise functions. `backward` undoes broadcasting, so each rule is the scalar formula."""

from __future__ import annotations

import inspect
import math
from typing import Any

from xformer.backends import device, is_complex
from xformer.tracing.record import base_function
from xformer.tracing.rule import RULES, Formula, decomposition, defvjp, not_differentiable
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


# --- scipy.special ----------------------------------------------------------------------------------------------------
#
# A trace has these as `xp.special` on the arrays of every library. SciPy calls them for traced arrays: as ufuncs on
# NumPy, and with SCIPY_ARRAY_API=1 on all libraries.


def _call(xp: Any, name: str, *args: Any) -> Any:
    return base_function(xp, f"special.{name}")(*args)


def _ratio(xp: Any, a: Any, b: Any, limit: float = 0.0) -> Any:
    """Return a / b, and a limit where a is zero, as b may be."""
    return xp.where(a == 0, limit, a / xp.where(a == 0, 1.0, b))


# Densities of distributions.


def _normal(xp: Any, x: Any, log_scale: Any = 0.0) -> Any:
    return xp.exp(-0.5 * x * x - log_scale) / math.sqrt(2.0 * math.pi)


def _student(xp: Any, x: Any, df: Any) -> Any:
    df = array_like(xp, df, x)
    scale = xp.exp(_call(xp, "gammaln", 0.5 * (df + 1.0)) - _call(xp, "gammaln", 0.5 * df))
    return scale / xp.sqrt(math.pi * df) * (1.0 + x * x / df) ** (-0.5 * (df + 1.0))


def _gamma(xp: Any, x: Any, a: Any) -> Any:
    a = array_like(xp, a, x)
    return xp.exp(_call(xp, "xlogy", a - 1.0, x) - x - _call(xp, "gammaln", a))


def _beta(xp: Any, x: Any, a: Any, b: Any) -> Any:
    a, b = array_like(xp, a, x), array_like(xp, b, x)
    powers = _call(xp, "xlogy", a - 1.0, x) + _call(xp, "xlog1py", b - 1.0, -x)
    return xp.exp(powers - _call(xp, "betaln", a, b))


def _fisher(xp: Any, x: Any, m: Any, n: Any) -> Any:
    total = m * x + n
    return _beta(xp, m * x / total, 0.5 * m, 0.5 * n) * (m * n / (total * total))


_SCALE = 2.0 / math.sqrt(math.pi)
# dy/dx of functions of x, and of functions of parameters and x.
_SLOPES: dict[str, Formula] = {
    "erf": lambda xp, x, y: _SCALE * xp.exp(-x * x),
    "erfc": lambda xp, x, y: -_SCALE * xp.exp(-x * x),
    "erfinv": lambda xp, x, y: xp.exp(y * y) / _SCALE,
    "ndtr": lambda xp, x, y: _normal(xp, x),
    "ndtri": lambda xp, x, y: 1.0 / _normal(xp, y),
    "log_ndtr": lambda xp, x, y: _normal(xp, x, y),
    "expit": lambda xp, x, y: y * (1.0 - y),
    "log_expit": lambda xp, x, y: -xp.expm1(y),
    "logit": lambda xp, x, y: 1.0 / (x * (1.0 - x)),
    "gamma": lambda xp, x, y: y * _call(xp, "digamma", x),
    **dict.fromkeys(("gammaln", "loggamma"), lambda xp, x, y: _call(xp, "digamma", x)),
    **dict.fromkeys(("digamma", "psi"), lambda xp, x, y: _call(xp, "polygamma", 1, x)),
    "polygamma": lambda xp, x, y, n: _call(xp, "polygamma", n + 1, x),
    "entr": lambda xp, x, y: -xp.log(x) - 1.0,
    "huber": lambda xp, x, y, delta: xp.where(xp.abs(x) <= delta, x, delta * xp.sign(x)),
    "i0": lambda xp, x, y: _call(xp, "i1", x),
    "i0e": lambda xp, x, y: _call(xp, "i1e", x) - xp.sign(x) * y,
    "i1": lambda xp, x, y: _call(xp, "i0", x) - _ratio(xp, y, x, 0.5),
    "i1e": lambda xp, x, y: _call(xp, "i0e", x) - _ratio(xp, y, x, 0.5) - xp.sign(x) * y,
    "exp2": lambda xp, x, y: y * math.log(2.0),
    "cbrt": lambda xp, x, y: 1.0 / (3.0 * y * y),
    "gammainc": lambda xp, x, y, a: _gamma(xp, x, a),
    "gammaincc": lambda xp, x, y, a: -_gamma(xp, x, a),
    "chdtr": lambda xp, x, y, df: 0.5 * _gamma(xp, 0.5 * x, 0.5 * df),
    "chdtrc": lambda xp, x, y, df: -0.5 * _gamma(xp, 0.5 * x, 0.5 * df),
    "stdtr": lambda xp, x, y, df: _student(xp, x, df),
    "betainc": lambda xp, x, y, a, b: _beta(xp, x, a, b),
    "betaincc": lambda xp, x, y, a, b: -_beta(xp, x, a, b),
    "fdtrc": lambda xp, x, y, m, n: -_fisher(xp, x, m, n),
}
# dy/da and dy/db of functions of two arrays.
_SLOPES_OF_TWO: dict[str, tuple[Formula, Formula]] = {
    "xlogy": (lambda xp, a, b: xp.log(b), _ratio),
    "xlog1py": (lambda xp, a, b: xp.log1p(b), lambda xp, a, b: _ratio(xp, a, b + 1.0)),
    "rel_entr": (lambda xp, a, b: xp.log(a / b) + 1.0, lambda xp, a, b: -_ratio(xp, a, b)),
    "kl_div": (lambda xp, a, b: xp.log(a / b), lambda xp, a, b: 1.0 - _ratio(xp, a, b)),
    "betaln": (
        lambda xp, a, b: _call(xp, "digamma", a) - _call(xp, "digamma", a + b),
        lambda xp, a, b: _call(xp, "digamma", b) - _call(xp, "digamma", a + b),
    ),
}


def _scaled_by_two(slope: Formula) -> Formula:
    return lambda xp, g, a, b: g * slope(xp, array_like(xp, a, g), array_like(xp, b, g))


for _name, _slope in _SLOPES.items():
    _formula = lambda xp, g, x, y, *parameters, _slope=_slope: g * _slope(xp, x, y, *parameters)  # noqa: E731
    defvjp(f"special.{_name}", _formula, positions=(len(inspect.signature(_slope).parameters) - 3,))
for _name, _slopes in _SLOPES_OF_TWO.items():
    defvjp(f"special.{_name}", *map(_scaled_by_two, _slopes))
RULES |= {f"special.{name}": RULES[name] for name in ("expm1", "log1p")}
ELEMENTWISE |= {name for name in RULES if name.startswith("special.")}


@decomposition("special.sinc")
def sinc(xp: Any, x: Any, /) -> Any:
    """Compute sin(pi x) / (pi x), and its Taylor polynomial at zero."""
    angle = math.pi * x
    is_zero = angle == 0.0
    return xp.where(is_zero, 1.0 - angle * angle / 6.0, xp.sin(angle) / xp.where(is_zero, 1.0, angle))
