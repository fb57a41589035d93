"""Derivatives of the functions of `scipy.special`, which a trace has as `xp.special` on the arrays of every library.

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
    """Return a / b, and a limit where b is zero."""
    is_zero = b == 0
    return xp.where(is_zero, limit, a / xp.where(is_zero, 1.0, b))


def _normal(xp: Any, x: Any) -> Any:
    return xp.exp(-0.5 * x * x) / math.sqrt(2.0 * math.pi)


def _student(xp: Any, df: Any, t: Any) -> Any:
    df = array_like(xp, df, t)
    scale = xp.exp(_call(xp, "gammaln", 0.5 * (df + 1.0)) - _call(xp, "gammaln", 0.5 * df))
    return scale / xp.sqrt(math.pi * df) * (1.0 + t * t / df) ** (-0.5 * (df + 1.0))


def _gamma(xp: Any, a: Any, x: Any) -> Any:
    a = array_like(xp, a, x)
    return xp.exp(_call(xp, "xlogy", a - 1.0, x) - x - _call(xp, "gammaln", a))


def _beta(xp: Any, a: Any, b: Any, x: Any) -> Any:
    a, b = array_like(xp, a, x), array_like(xp, b, x)
    powers = _call(xp, "xlogy", a - 1.0, x) + _call(xp, "xlog1py", b - 1.0, -x)
    return xp.exp(powers - _call(xp, "betaln", a, b))


def _fisher(xp: Any, m: Any, n: Any, x: Any) -> Any:
    total = m * x + n
    return _beta(xp, 0.5 * m, 0.5 * n, m * x / total) * (m * n / (total * total))


def _share(xp: Any, a: Any, b: Any) -> Any:
    """Return a / b, and zero where a is zero."""
    return xp.where(a == 0, 0.0, a) / xp.where(a == 0, 1.0, b)


def _difference(xp: Any, a: Any, b: Any) -> Any:
    return _call(xp, "digamma", a) - _call(xp, "digamma", a + b)


_HALF_PI = 0.5 * math.sqrt(math.pi)
# Functions of x: dy/dx.
_SLOPES: dict[str, Formula] = {
    "erf": lambda xp, x, y: xp.exp(-x * x) / _HALF_PI,
    "erfc": lambda xp, x, y: -xp.exp(-x * x) / _HALF_PI,
    "erfcx": lambda xp, x, y: 2.0 * x * y - 1.0 / _HALF_PI,
    "erfinv": lambda xp, x, y: _HALF_PI * xp.exp(y * y),
    "erfcinv": lambda xp, x, y: -_HALF_PI * xp.exp(y * y),
    "dawsn": lambda xp, x, y: 1.0 - 2.0 * x * y,
    "ndtr": lambda xp, x, y: _normal(xp, x),
    "ndtri": lambda xp, x, y: 1.0 / _normal(xp, y),
    "log_ndtr": lambda xp, x, y: xp.exp(-0.5 * x * x - y) / math.sqrt(2.0 * math.pi),
    "expit": lambda xp, x, y: y * (1.0 - y),
    "log_expit": lambda xp, x, y: -xp.expm1(y),
    "logit": lambda xp, x, y: 1.0 / (x * (1.0 - x)),
    "gamma": lambda xp, x, y: y * _call(xp, "digamma", x),
    "rgamma": lambda xp, x, y: -y * _call(xp, "digamma", x),
    **dict.fromkeys(("gammaln", "loggamma"), lambda xp, x, y: _call(xp, "digamma", x)),
    **dict.fromkeys(("digamma", "psi"), lambda xp, x, y: _call(xp, "polygamma", 1, x)),
    "entr": lambda xp, x, y: -xp.log(x) - 1.0,
    "i0": lambda xp, x, y: _call(xp, "i1", x),
    "i0e": lambda xp, x, y: _call(xp, "i1e", x) - xp.sign(x) * y,
    "i1": lambda xp, x, y: _call(xp, "i0", x) - _ratio(xp, y, x, 0.5),
    "i1e": lambda xp, x, y: _call(xp, "i0e", x) - _ratio(xp, y, x, 0.5) - xp.sign(x) * y,
    "j0": lambda xp, x, y: -_call(xp, "j1", x),
    "j1": lambda xp, x, y: _call(xp, "j0", x) - _ratio(xp, y, x, 0.5),
    "y0": lambda xp, x, y: -_call(xp, "y1", x),
    "y1": lambda xp, x, y: _call(xp, "y0", x) - y / x,
    "k0": lambda xp, x, y: -_call(xp, "k1", x),
    "k0e": lambda xp, x, y: y - _call(xp, "k1e", x),
    "k1": lambda xp, x, y: -_call(xp, "k0", x) - y / x,
    "k1e": lambda xp, x, y: y - _call(xp, "k0e", x) - y / x,
    "exp1": lambda xp, x, y: -xp.exp(-x) / x,
    "expi": lambda xp, x, y: xp.exp(x) / x,
    "exp2": lambda xp, x, y: y * math.log(2.0),
    "exp10": lambda xp, x, y: y * math.log(10.0),
    "expm1": lambda xp, x, y: y + 1.0,
    "log1p": lambda xp, x, y: 1.0 / (x + 1.0),
    "cosm1": lambda xp, x, y: -xp.sin(x),
    "cbrt": lambda xp, x, y: 1.0 / (3.0 * y * y),
    "spence": lambda xp, x, y: -_ratio(xp, xp.log(x), x - 1.0, 1.0),
}
# Functions of parameters and x: dy/dx.
_SLOPES_OF_LAST: dict[str, Formula] = {
    "polygamma": lambda xp, x, y, n: _call(xp, "polygamma", n + 1, x),
    "zeta": lambda xp, x, y, s: -s * _call(xp, "zeta", s + 1, x),
    "expn": lambda xp, x, y, n: -_call(xp, "expn", n - 1, x),
    "huber": lambda xp, x, y, delta: xp.where(xp.abs(x) <= delta, x, delta * xp.sign(x)),
    "pseudo_huber": lambda xp, x, y, delta: x / xp.sqrt(1.0 + (x / delta) * (x / delta)),
    "gammainc": lambda xp, x, y, a: _gamma(xp, a, x),
    "gammaincc": lambda xp, x, y, a: -_gamma(xp, a, x),
    "gammaincinv": lambda xp, x, y, a: 1.0 / _gamma(xp, a, y),
    "gammainccinv": lambda xp, x, y, a: -1.0 / _gamma(xp, a, y),
    "chdtr": lambda xp, x, y, v: 0.5 * _gamma(xp, 0.5 * v, 0.5 * x),
    "chdtrc": lambda xp, x, y, v: -0.5 * _gamma(xp, 0.5 * v, 0.5 * x),
    "stdtr": lambda xp, x, y, df: _student(xp, df, x),
    "stdtrit": lambda xp, x, y, df: 1.0 / _student(xp, df, y),
    "betainc": lambda xp, x, y, a, b: _beta(xp, a, b, x),
    "betaincc": lambda xp, x, y, a, b: -_beta(xp, a, b, x),
    "betaincinv": lambda xp, x, y, a, b: 1.0 / _beta(xp, a, b, y),
    "fdtr": lambda xp, x, y, m, n: _fisher(xp, m, n, x),
    "fdtrc": lambda xp, x, y, m, n: -_fisher(xp, m, n, x),
}
# Functions of two arrays: dy/da and dy/db.
_SLOPES_OF_BOTH: dict[str, tuple[Formula, Formula]] = {
    "xlogy": (lambda xp, a, b, y: xp.log(b), lambda xp, a, b, y: _share(xp, a, b)),
    "xlog1py": (lambda xp, a, b, y: xp.log1p(b), lambda xp, a, b, y: _share(xp, a, b + 1.0)),
    "rel_entr": (lambda xp, a, b, y: xp.log(a / b) + 1.0, lambda xp, a, b, y: -_share(xp, a, b)),
    "kl_div": (lambda xp, a, b, y: xp.log(a / b), lambda xp, a, b, y: 1.0 - _share(xp, a, b)),
    "betaln": (lambda xp, a, b, y: _difference(xp, a, b), lambda xp, a, b, y: _difference(xp, b, a)),
    "beta": (lambda xp, a, b, y: y * _difference(xp, a, b), lambda xp, a, b, y: y * _difference(xp, b, a)),
}


def _define(name: str, slope: Formula, position: int) -> None:
    def formula(xp: Any, g: Any, x: Any, y: Any, *parameters: Any) -> Any:
        return g * slope(xp, x, y, *parameters)

    defvjp(f"special.{name}", formula, positions=(position,))


def _define_both(name: str, first: Formula, second: Formula) -> None:
    def times(slope: Formula) -> Formula:
        return lambda xp, g, a, b, y: g * slope(xp, array_like(xp, a, y), array_like(xp, b, y), y)

    defvjp(f"special.{name}", times(first), times(second))


for _name, _slope in _SLOPES.items():
    _define(_name, _slope, 0)
for _name, _slope in _SLOPES_OF_LAST.items():
    _define(_name, _slope, len(inspect.signature(_slope).parameters) - 3)
for _name, _slopes in _SLOPES_OF_BOTH.items():
    _define_both(_name, *_slopes)
ELEMENTWISE |= {name for name in RULES if name.startswith("special.")}


@decomposition("special.sinc")
def sinc(xp: Any, x: Any, /) -> Any:
    """Compute sin(pi x) / (pi x), and its Taylor polynomial at zero."""
    angle = math.pi * x
    is_zero = angle == 0.0
    return xp.where(is_zero, 1.0 - angle * angle / 6.0, xp.sin(angle) / xp.where(is_zero, 1.0, angle))


@decomposition("special.multigammaln")
def _multigammaln(xp: Any, a: Any, d: Any, /) -> Any:
    terms = (xp.special.gammaln(a - 0.5 * i) for i in range(int(d)))
    return sum(terms, 0.25 * int(d) * (int(d) - 1) * math.log(math.pi))
