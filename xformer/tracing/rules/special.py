"""Derivatives of functions of `scipy.special`, which a trace has as `xp.special` on the arrays of every library.

SciPy calls them for traced arrays: as ufuncs on NumPy, and with SCIPY_ARRAY_API=1 on all libraries.
"""

from __future__ import annotations

import inspect
import math
from typing import Any

from xformer.tracing.record import base_function
from xformer.tracing.rule import RULES, Formula, decomposition, defvjp
from xformer.tracing.rules.elementwise import ELEMENTWISE, array_like


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
