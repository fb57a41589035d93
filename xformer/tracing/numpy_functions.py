"""NumPy's functions and methods on traced NumPy arrays: each is the function of the standard, or composed of those.

`__array_ufunc__` and `__array_function__` of a `Tracer` look them up here, so code that was written with `np` alone has
derivatives and becomes programs. A function that is not here raises an error with its name.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import math
import operator
import re
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from xformer.errors import DifferentiationError
from xformer.tracing.record import IN_BOTH
from xformer.tracing.rule import DECOMPOSITIONS, NOT_DIFFERENTIABLE, OUTPUT_RULES, RULES, SEQUENCE_RULES, registrar
from xformer.tracing.rules.elementwise import ELEMENTWISE, conjugate, sinc, squared_size
from xformer.tracing.tracer import OPERATORS_OF_NUMPY, Batch, Tracer
from xformer.tree import map_items

Function = Callable[..., Any]

# Functions by their name in NumPy, such as "sum" or "linalg.norm": f(xp, *arguments of NumPy). All others are functions
# of the standard, by these names.
FUNCTIONS: dict[str, Function] = {}
_STANDARD_NAMES = {
    **{f"arc{name}": f"a{name}" for name in ("sin", "cos", "tan", "sinh", "cosh", "tanh")},
    **{name: f"operator_{operator}" for name, operator in OPERATORS_OF_NUMPY.items()},
    "absolute": "abs",
    "fabs": "abs",
    "arctan2": "atan2",
    "conjugate": "conj",
    "rint": "round",
    "fix": "trunc",
    "amax": "max",
    "amin": "min",
    "mod": "operator_mod",
    "float_power": "pow",
    "invert": "bitwise_invert",
    "array": "asarray",
    **{f"linalg.{name}": name for name in IN_BOTH},
}
# The names of their arguments after the array, which the standard takes by keyword.
_AXIS = ("axis",)
_ARGUMENTS = {
    **dict.fromkeys(("sum", "prod", "mean"), ("axis", "dtype")),
    **dict.fromkeys(("max", "min", "amax", "amin", "flip", "argmax", "argmin", "all", "any"), _AXIS),
    **dict.fromkeys(("expand_dims", "squeeze", "count_nonzero"), _AXIS),
    **dict.fromkeys(("std", "var"), ("axis", "dtype", "ddof")),
    **dict.fromkeys(("tril", "triu"), ("k",)),
    **dict.fromkeys(("fft.fft", "fft.ifft", "fft.rfft", "fft.irfft", "fft.hfft", "fft.ihfft"), ("n", "axis", "norm")),
    **dict.fromkeys(("fft.fftn", "fft.ifftn", "fft.rfftn", "fft.irfftn"), ("s", "axes", "norm")),
    **dict.fromkeys(("fft.fftshift", "fft.ifftshift"), ("axes",)),
    "roll": ("shift", "axis"),
    "linalg.qr": ("mode",),
}
_KNOWN = {*RULES, *SEQUENCE_RULES, *OUTPUT_RULES, *DECOMPOSITIONS, *NOT_DIFFERENTIABLE}
_INSTEAD = {"where": "; use np.where(condition, x, y)", "out": "; use the result, as in y = np.add(a, b)"}
_REDUCTIONS = {"add": "sum", "multiply": "prod", "maximum": "max", "minimum": "min"}
_REDUCTIONS |= {"logical_and": "all", "logical_or": "any"}
_ACCUMULATIONS = {"add": "cumulative_sum", "multiply": "cumulative_prod"}


def define(*names: str) -> Callable[[Function], Function]:
    """Return a decorator that registers a function under its names in NumPy."""
    return registrar(FUNCTIONS, *names)


def _trace_of(values: Any) -> Any:
    """Return the innermost trace of the arrays in nested tuples and lists, or None."""
    if type(values) is Tracer:
        return values._namespace
    if not isinstance(values, tuple | list):
        return None
    traces = [trace for trace in map(_trace_of, values) if trace is not None]
    return max(traces, key=lambda trace: trace.trace_level, default=None)


def call_function(name: str, args: Any, keywords: dict[str, Any], like: Any = None, function: Any = None) -> Any:
    """Call a function of NumPy by its name, such as "linalg.norm"; `like` is the trace if no argument has one."""
    xp = _trace_of((*args, *keywords.values())) or like
    given = {key: value for key, value in keywords.items() if value is not np._NoValue}
    for key in ("out", "where", "initial", "casting", "subok"):
        value = given.pop(key, None)
        if not (value is None or value is True or isinstance(value, str)):
            _refuse(name, key + _INSTEAD.get(key, ""))
    try:
        return _call(xp, name, args, given, function)
    except TypeError as error:
        unknown = re.search(r"unexpected keyword argument '(\w+)'", str(error))
        if unknown is None:
            raise
    return _refuse(name, unknown[1])


def _call(xp: Any, name: str, args: tuple[Any, ...], given: dict[str, Any], function: Any) -> Any:
    if given.get("dtype") is not None and name != "linspace":  # in which NumPy computes
        args = tuple(_cast(xp, x, given["dtype"]) if type(x) is Tracer else x for x in args)
    if name in FUNCTIONS:
        return FUNCTIONS[name](xp, *args, **given)
    standard = _STANDARD_NAMES.get(name, name)
    if not (standard in _KNOWN or standard.startswith("operator_")):
        return call_on_values(function, args, given, f"np.{name}")
    if name in _ARGUMENTS:
        args, given = args[:1], given | dict(zip(_ARGUMENTS[name], args[1:], strict=False))
    if "ddof" in given:
        given["correction"] = float(given.pop("ddof"))
    dtype, axis = given.pop("dtype", None), given.get("axis")
    given = {key: tuple(axis) if key == "axis" and isinstance(axis, list) else value for key, value in given.items()}
    given = {key: value for key, value in given.items() if value is not None and key != "kind"}
    result = functools.reduce(getattr, standard.split("."), xp)(*args, **given)
    return _cast(xp, result, dtype)


def call_ufunc(ufunc: Any, method: str, inputs: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Call a method of a ufunc of NumPy: a function of arrays, or its reduction, accumulation or outer product."""
    name, xp = ufunc.__name__, _trace_of(inputs)
    if ufunc is not getattr(np, name, None):
        is_special = getattr(sys.modules.get("scipy.special"), name, None) is ufunc
        if is_special and method == "__call__" and f"special.{name}" in _KNOWN:
            if options:
                _refuse(f"special.{name}", min(options))
            return getattr(xp, f"special.{name}")(*inputs)
        return call_on_values(getattr(ufunc, method), inputs, options, name)
    if method == "__call__":
        options = {key: value for key, value in options.items() if key != "order"}
        return call_function(name, inputs, options, function=ufunc)
    if method == "reduce" and name in _REDUCTIONS:
        return call_function(_REDUCTIONS[name], inputs, {"axis": 0, **options})
    if method == "accumulate" and name in _ACCUMULATIONS:
        return getattr(xp, _ACCUMULATIONS[name])(inputs[0], axis=options.get("axis", 0))
    if method == "outer":
        first, second = (xp.asarray(x) for x in inputs)
        return call_function(name, (xp.reshape(first, (*first.shape, *[1] * second.ndim)), second), options)
    raise DifferentiationError(f"np.{name}.{method} of a traced array has no derivative rule")


# --- values -----------------------------------------------------------------------------------------------------------


def _unique(xp: Any, x: Any) -> Any:
    """Return each value once, NaN too; in vmap, which reads no values, as the standard does."""
    if type(x) is Tracer and type(x._value) is Batch:
        return xp.unique_values(x)
    return x[np.unique(_values(x, "bool"), return_index=True)[1]]


def _values(value: Any, use: str) -> Any:
    """Return arrays that are read for a `use`, also in tuples, lists and dicts."""
    if type(value) is Tracer:
        return _values(value._namespace.read(value, use), use)
    return map_items(lambda item: _values(item, use), value)


def call_on_values(function: Function, args: tuple[Any, ...], keywords: dict[str, Any], use: str) -> Any:
    """Call a function with arrays that are read for a `use`."""
    return function(*_values(args, use), **_values(keywords, use))


def _constant(name: str) -> Function:
    """Return a function whose result is no array, or locally constant: it reads values as a branch does."""
    return lambda xp, *args, **keywords: call_on_values(getattr(np, name), args, keywords, "bool")


for _name in (
    *("allclose", "array_equal", "array_equiv", "isclose", "digitize", "isin", "lexsort"),
    *("argwhere", "flatnonzero", "argpartition", "iscomplex", "isreal", "isneginf", "isposinf"),
):
    FUNCTIONS[_name] = _constant(_name)
FUNCTIONS |= {
    "shape": lambda xp, x: tuple(x.shape),
    "ndim": lambda xp, x: x.ndim,
    "size": lambda xp, x, axis=None: math.prod(x.shape if axis is None else [x.shape[i] for i in _tuple(axis)]),
    "real_if_close": lambda xp, x, tol=100: (
        xp.real(x) if np.isrealobj(np.real_if_close(_values(x, "bool"), tol)) else x
    ),
    "iscomplexobj": lambda xp, x: "complex" in str(x.dtype),
    "isrealobj": lambda xp, x: "complex" not in str(x.dtype),
    "copy": lambda xp, x, order="K": xp.asarray(x, copy=True),
    # elementwise
    "sinc": sinc,
    "i0": lambda xp, x: getattr(xp, "special.i0")(x),
    "deg2rad": lambda xp, x: x * (math.pi / 180.0),
    "rad2deg": lambda xp, x: x * (180.0 / math.pi),
    "exp2": lambda xp, x: 2.0**x,
    "cbrt": lambda xp, x: _signed(xp, x, xp.where(x < 0, -x, x) ** (1.0 / 3.0)),
    "logaddexp2": lambda xp, a, b: xp.logaddexp(a * math.log(2.0), b * math.log(2.0)) / math.log(2.0),
    "fmax": lambda xp, a, b: xp.maximum(*_numbers(xp, a, b)),
    "fmin": lambda xp, a, b: xp.minimum(*_numbers(xp, a, b)),
    "fmod": lambda xp, a, b: _signed(xp, a, xp.remainder(xp.where(xp.asarray(a) < 0, -a, a), xp.abs(xp.asarray(b)))),
    "divmod": lambda xp, a, b: (a // b, a % b),
    "heaviside": lambda xp, a, b: xp.where(xp.asarray(a) == 0, b, 0.5 * xp.sign(xp.asarray(a)) + 0.5),
    "clip": lambda xp, x, a_min=None, a_max=None, min=None, max=None: xp.clip(
        x, min if a_min is None else a_min, max if a_max is None else a_max
    ),
    "select": lambda xp, conditions, choices, default=0.0: functools.reduce(
        lambda y, pair: _where(xp, *pair, y), reversed(list(zip(conditions, choices, strict=True))), default
    ),
    "around": lambda xp, x, decimals=0: xp.round(x * 10.0**decimals) / 10.0**decimals if decimals else xp.round(x),
    "angle": lambda xp, x, deg=False: xp.atan2(xp.imag(x), xp.real(x)) * (180.0 / math.pi if deg else 1.0),
}
FUNCTIONS |= {"round": FUNCTIONS["around"], "radians": FUNCTIONS["deg2rad"], "degrees": FUNCTIONS["rad2deg"]}


def _numbers(xp: Any, a: Any, b: Any) -> tuple[Any, Any]:
    """Return two arrays, each with the other's elements where its own are NaN."""
    a, b = xp.asarray(a), xp.asarray(b)
    return xp.where(xp.isnan(a), b, a), xp.where(xp.isnan(b), a, b)


def _signed(xp: Any, x: Any, size: Any) -> Any:
    return xp.where(xp.asarray(x) < 0, -size, size)


@define("bincount")
def _bincount(xp: Any, x: Any, weights: Any = None, minlength: int = 0) -> Any:
    indices = np.asarray(_values(x, "bool"))
    counts = np.bincount(indices, minlength=minlength)
    return counts if weights is None else xp.scatter_add(xp.zeros(counts.shape, dtype=xp.float64), indices, weights)


@define("where")
def _where(xp: Any, condition: Any, *branches: Any) -> Any:
    if not branches:
        return xp.nonzero(condition)
    if not isinstance(condition, Tracer | np.ndarray):
        condition = xp.asarray(condition)
    return xp.where(condition != 0, *branches)


@define("nan_to_num")
def _nan_to_num(xp: Any, x: Any, copy: bool = True, nan: float = 0.0, posinf: Any = None, neginf: Any = None) -> Any:
    limits = np.finfo(x.dtype)
    x = xp.where(xp.isnan(x), nan, x)
    x = xp.where(x == math.inf, limits.max if posinf is None else posinf, x)
    return xp.where(x == -math.inf, limits.min if neginf is None else neginf, x)


# --- shape and order --------------------------------------------------------------------------------------------------

FUNCTIONS |= {
    "reshape": lambda xp, x, shape=None, order="C", *, newshape=None, copy=None: (
        xp.reshape(x, _tuple(newshape if shape is None else shape))
        if order == "C"
        else _elements_in_order(xp, x, "reshape", order, _tuple(newshape if shape is None else shape))
    ),
    "ravel": lambda xp, x, order="C": (
        xp.reshape(x, (-1,)) if order == "C" else _elements_in_order(xp, x, "ravel", order)
    ),
    "squeeze": lambda xp, x, axis=None: xp.squeeze(
        x, axis=tuple(i for i, n in enumerate(x.shape) if n == 1) if axis is None else axis
    ),
    "atleast_1d": lambda xp, x: xp.reshape(x, (1,)) if x.ndim == 0 else x,
    "atleast_3d": lambda xp, x: x if x.ndim > 2 else FUNCTIONS["atleast_2d"](xp, x)[..., None],
    "atleast_2d": lambda xp, x: xp.reshape(x, (1, *x.shape)[-2:]) if x.ndim == 1 else x if x.ndim else x[None, None],
    "concatenate": lambda xp, arrays, axis=0: xp.concat(_arrays(xp, arrays), axis=axis),
    "stack": lambda xp, arrays, axis=0: xp.stack(_arrays(xp, arrays), axis=axis),
    "vstack": lambda xp, arrays: xp.concat([FUNCTIONS["atleast_2d"](xp, x) for x in _arrays(xp, arrays)], axis=0),
    "hstack": lambda xp, arrays: xp.concat(
        [FUNCTIONS["atleast_1d"](xp, x) for x in _arrays(xp, arrays)], axis=int(_arrays(xp, arrays)[0].ndim > 1)
    ),
    "dstack": lambda xp, arrays: xp.concat([FUNCTIONS["atleast_3d"](xp, x) for x in _arrays(xp, arrays)], axis=2),
    "column_stack": lambda xp, arrays: xp.concat(
        [xp.reshape(x, (-1, 1)) if x.ndim < 2 else x for x in _arrays(xp, arrays)], axis=1
    ),
    "append": lambda xp, x, values, axis=None: xp.concat(
        [xp.reshape(y, (-1,)) if axis is None else y for y in _arrays(xp, (x, values))], axis=axis or 0
    ),
    "ediff1d": lambda xp, x: xp.diff(xp.reshape(x, (-1,))),
    "tile": lambda xp, x, reps: xp.tile(x, _tuple(reps)),
    "fliplr": lambda xp, x: xp.flip(x, axis=1),
    "flipud": lambda xp, x: xp.flip(x, axis=0),
    "take": lambda xp, x, indices, axis=None, mode="raise": (
        _along(xp, _flat(xp, x, axis), indices, axis or 0)
        if mode == "raise"
        else _elements(xp, x, "take", _values(indices, "bool"), axis=axis, mode=mode)
    ),
    "partition": lambda xp, x, kth, axis=-1: FUNCTIONS["sort"](xp, x, axis),
    "take_along_axis": lambda xp, x, indices, axis=-1: xp.take_along_axis(_flat(xp, x, axis), indices, axis=axis or 0),
    "compress": lambda xp, condition, x, axis=None: FUNCTIONS["take"](xp, x, np.flatnonzero(condition), axis),
    "split": lambda xp, x, sections, axis=0: _split(xp, x, sections, axis),
    "array_split": lambda xp, x, sections, axis=0: _split(xp, x, sections, axis, np.array_split),
    "hsplit": lambda xp, x, sections: _split(xp, x, sections, int(x.ndim > 1)),
    "vsplit": lambda xp, x, sections: _split(xp, x, sections, 0),
    "dsplit": lambda xp, x, sections: _split(xp, x, sections, 2),
    "sort": lambda xp, x, axis=-1, kind=None, *, stable=None: xp.sort(_flat(xp, x, axis), axis=axis or 0),
    "argsort": lambda xp, x, axis=-1, kind=None, *, stable=None: xp.argsort(_flat(xp, x, axis), axis=axis or 0),
    "unique": lambda xp, x: _unique(xp, _flat(xp, x, None)),
}
FUNCTIONS |= {"row_stack": FUNCTIONS["vstack"]}
for _name in ("diagonal", "trace"):
    FUNCTIONS[_name] = lambda xp, x, offset=0, axis1=0, axis2=1, name=_name: getattr(xp.linalg, name)(
        xp.moveaxis(x, (axis1, axis2), (-2, -1)), offset=offset
    )
for _name in ("delete", "repeat", "lib.stride_tricks.sliding_window_view"):
    FUNCTIONS[_name] = lambda xp, x, *args, name=_name, **options: _elements(xp, x, name, *args, **options)
for _name in ("rollaxis", "swapaxes", "transpose"):  # as they permute an array of shape (0, 1, 2, ...)
    FUNCTIONS[_name] = lambda xp, x, *args, name=_name, **options: xp.permute_dims(
        x, getattr(np, name)(np.empty(tuple(range(x.ndim))), *args, **options).shape
    )


def _refuse(name: str, argument: str) -> Any:
    raise DifferentiationError(f"np.{name} of a traced array has no argument {argument}")


def _elements(xp: Any, x: Any, name: str, *args: Any, **options: Any) -> Any:
    """Return the elements of `x` whose positions a function of NumPy selects."""
    positions, function = np.arange(math.prod(x.shape)).reshape(x.shape), operator.attrgetter(name)(np)
    return xp.reshape(x, (-1,))[function(positions, *args, **options)]


def _elements_in_order(xp: Any, x: Any, name: str, order: str, *args: Any) -> Any:
    return _elements(xp, x, name, *args, order=order) if order == "F" else _refuse(name, f"order={order!r}")


def _cast(xp: Any, x: Any, dtype: Any) -> Any:
    return x if dtype is None else xp.astype(x, np.dtype(dtype))


def _tuple(value: Any) -> tuple[int, ...]:
    return tuple(value) if isinstance(value, tuple | list) else (value,)


def _arrays(xp: Any, values: Any) -> list[Any]:
    """Return arrays of one dtype, as NumPy concatenates."""
    arrays = [x if isinstance(x, Tracer | np.ndarray) else xp.asarray(x) for x in values]
    dtype = xp.result_type(*arrays)
    return [x if x.dtype == dtype else xp.astype(x, dtype) for x in arrays]


def _along(xp: Any, x: Any, indices: Any, axis: int) -> Any:
    return x[(*[slice(None)] * (axis % x.ndim), indices)]


def _split(xp: Any, x: Any, sections: Any, axis: int, split: Function = np.split) -> list[Any]:
    """Return the parts into which a function of NumPy splits the positions along an axis."""
    parts = [part.tolist() for part in split(np.arange(x.shape[axis]), sections)]
    return [_along(xp, x, slice(part[0], part[-1] + 1) if part else slice(0), axis) for part in parts]


@define("block")
def _block(xp: Any, arrays: Any) -> Any:
    """Return the elements of all arrays as NumPy places their positions."""
    parts: list[Any] = []

    def positions(x: Any) -> Any:
        if isinstance(x, list):
            return [*map(positions, x)]
        parts.append(xp.reshape(xp.asarray(x), (-1,)))
        return sum(part.size for part in parts[:-1]) + np.arange(parts[-1].size).reshape(np.shape(x))

    places = np.block(positions(arrays))
    return xp.concat(_arrays(xp, parts))[places]


@define("diag")
def _diag(xp: Any, x: Any, k: int = 0) -> Any:
    if x.ndim == 2:
        return xp.linalg.diagonal(x, offset=k)
    size = x.shape[0] + abs(k)
    zeros = xp.zeros((size * size,), dtype=x.dtype)
    start = k if k >= 0 else -k * size
    return xp.reshape(xp.setitem(zeros, x, start + (size + 1) * np.arange(x.shape[0])), (size, size))


@define("rot90")
def _rot90(xp: Any, x: Any, k: int = 1, axes: tuple[int, int] = (0, 1)) -> Any:
    for _ in range(k % 4):
        x = xp.flip(FUNCTIONS["swapaxes"](xp, x, *axes), axis=axes[0])
    return x


@define("pad")
def _pad(xp: Any, x: Any, pad_width: Any, mode: str = "constant", constant_values: Any = 0) -> Any:
    """Pad by values, or by the elements that NumPy selects."""
    widths = np.broadcast_to(np.asarray(pad_width), (x.ndim, 2)).tolist()
    values = np.broadcast_to(np.asarray(constant_values), (x.ndim, 2)).tolist()
    if mode not in ("constant", "edge", "reflect", "symmetric", "wrap"):
        _refuse("pad", f"mode={mode!r}")
    padded: Any = np.pad
    for axis, (width, (before, after)) in enumerate(zip(widths, values, strict=True)):
        if mode == "constant":
            shapes = [tuple(n if i == axis else size for i, size in enumerate(x.shape)) for n in width]
            ends = [xp.full(shape, value, dtype=x.dtype) for shape, value in zip(shapes, (before, after), strict=True)]
            x = xp.concat([ends[0], x, ends[1]], axis=axis)
        else:
            x = _along(xp, x, padded(np.arange(x.shape[axis]), width, mode), axis)
    return x


# --- reductions -------------------------------------------------------------------------------------------------------


def _without_nan(name: str, neutral: float) -> Function:
    """Return a reduction that leaves NaN out, by a neutral number in its place."""

    def reduce(xp: Any, x: Any, axis: Any = None, dtype: Any = None, *, keepdims: bool = False) -> Any:
        result = getattr(xp, name)(xp.where(xp.isnan(x), neutral, x), axis=axis, keepdims=keepdims)
        if math.isfinite(neutral):
            return result
        return xp.where(xp.all(xp.isnan(x), axis=axis, keepdims=keepdims), math.nan, result)

    return reduce


FUNCTIONS |= {
    "nansum": _without_nan("sum", 0.0),
    "nanstd": lambda xp, x, *args, **options: xp.sqrt(_nanvar(xp, x, *args, **options)),
    "nanprod": _without_nan("prod", 1.0),
    "nanmax": _without_nan("max", -math.inf),
    "nanmin": _without_nan("min", math.inf),
    "ptp": lambda xp, x, axis=None, **kept: xp.max(x, axis=axis, **kept) - xp.min(x, axis=axis, **kept),
    "cumsum": lambda xp, x, axis=None, dtype=None: xp.cumulative_sum(_flat(xp, x, axis), axis=axis or 0, dtype=dtype),
    "cumprod": lambda xp, x, axis=None, dtype=None: xp.cumulative_prod(_flat(xp, x, axis), axis=axis or 0, dtype=dtype),
    "median": lambda xp, x, axis=None, **options: _quantile(xp, x, 0.5, axis, **options),
    "percentile": lambda xp, x, q, *args, **options: _quantile(xp, x, np.asarray(q) / 100.0, *args, **options),
}


def _flat(xp: Any, x: Any, axis: Any) -> Any:
    """Return the array, or all elements in order if there is no axis."""
    return xp.reshape(x, (-1,)) if axis is None else x


@define("nanmean")
def _nanmean(xp: Any, x: Any, axis: Any = None, dtype: Any = None, *, keepdims: bool = False) -> Any:
    count = xp.sum(xp.astype(~xp.isnan(x), x.dtype), axis=axis, keepdims=keepdims)
    return FUNCTIONS["nansum"](xp, x, axis, keepdims=keepdims) / count


@define("nanvar")
def _nanvar(xp: Any, x: Any, axis: Any = None, dtype: Any = None, ddof: float = 0, *, keepdims: bool = False) -> Any:
    is_nan = xp.isnan(x)
    deviation = xp.where(is_nan, 0.0, xp.where(is_nan, 0.0, x) - _nanmean(xp, x, axis, keepdims=True))
    squares = squared_size(xp, deviation)
    count = xp.sum(xp.astype(~is_nan, squares.dtype), axis=axis, keepdims=keepdims) - ddof
    return xp.sum(squares, axis=axis, keepdims=keepdims) / xp.where(count > 0, count, math.nan)


@define("quantile")
def _quantile(xp: Any, x: Any, q: Any, axis: Any = None, *, method: str = "linear", keepdims: bool = False) -> Any:
    """Interpolate between the elements in order; q is a number or an array, whose axes come first."""
    if method != "linear":
        _refuse("quantile", f"method={method!r}")
    axes = tuple(range(x.ndim)) if axis is None else tuple(i % x.ndim for i in _tuple(axis))
    rest = [i for i in range(x.ndim) if i not in axes]
    kept = tuple(1 if i in axes else size for i, size in enumerate(x.shape))
    shape = (*(x.shape[i] for i in rest), math.prod(x.shape[i] for i in axes))
    rows, q = xp.sort(xp.reshape(xp.permute_dims(x, (*rest, *axes)), shape), axis=-1), np.asarray(q, np.float64)
    rows = rows if shape[-1] else xp.full((*shape[:-1], 1), math.nan, dtype=x.dtype)
    place = q * (rows.shape[-1] - 1)
    low, high = np.floor(place).astype(np.int64), np.ceil(place).astype(np.int64)
    weight = np.where(low == high, 0.5, place - low).astype(x.dtype)  # zero times infinity would be NaN
    values = rows[..., low] * (1 - weight) + rows[..., high] * weight
    values = xp.where(xp.isnan(rows[..., np.full(q.shape, -1)]), math.nan, values)  # NaN is the last in order
    values = xp.moveaxis(values, tuple(range(-q.ndim, 0)), tuple(range(q.ndim))) if q.ndim else values
    return xp.reshape(values, (*q.shape, *kept)) if keepdims else values


@define("average")
def _average(
    xp: Any, x: Any, axis: Any = None, weights: Any = None, returned: bool = False, *, keepdims: bool = False
) -> Any:
    weights = 1.0 if weights is None else weights
    if axis is not None and np.ndim(weights) == 1 and x.ndim > 1:
        weights = xp.reshape(xp.asarray(weights), tuple(-1 if i == axis % x.ndim else 1 for i in range(x.ndim)))
    weights = xp.astype(xp.asarray(weights), xp.result_type(x))
    total = xp.sum(weights + xp.zeros_like(x), axis=axis, keepdims=keepdims)
    mean = xp.sum(x * weights, axis=axis, keepdims=keepdims) / total
    return (mean, total) if returned else mean


@define("cov")
def _cov(
    xp: Any, m: Any, y: Any = None, rowvar: bool = True, bias: bool = False, ddof: Any = None, fweights: Any = None,
    aweights: Any = None,
) -> Any:  # fmt: skip
    rows = FUNCTIONS["atleast_2d"](xp, xp.asarray(m))
    rows = rows if rowvar or np.ndim(m) < 2 else xp.matrix_transpose(rows)
    if y is not None:
        y = FUNCTIONS["atleast_2d"](xp, xp.asarray(y))
        rows = xp.concat([rows, y if rowvar or y.shape[0] == 1 else xp.matrix_transpose(y)], axis=0)
    weights = np.ones(rows.shape[1])
    for each in (fweights, aweights):
        weights = weights if each is None else xp.asarray(each) * weights
    total, ddof = xp.sum(weights), (0 if bias else 1) if ddof is None else ddof
    total = total - (ddof if aweights is None else ddof * xp.sum(weights * aweights) / total)
    total = xp.where(total > 0, total, 0.0)
    rows = rows - _average(xp, rows, 1, weights, keepdims=True)
    product = xp.astype(rows * weights, rows.dtype) @ xp.conj(xp.matrix_transpose(rows)) / total
    return product if product.shape[0] != 1 else product[0, 0]


@define("corrcoef")
def _corrcoef(xp: Any, x: Any, y: Any = None, rowvar: bool = True) -> Any:
    c = _cov(xp, x, y, rowvar)
    if c.ndim == 0:
        return c / c
    size = xp.sqrt(xp.linalg.diagonal(c))
    return c / size[:, None] / size[None, :]


# --- products ---------------------------------------------------------------------------------------------------------


@define("dot")
def _dot(xp: Any, a: Any, b: Any) -> Any:
    a, b = xp.asarray(a), xp.asarray(b)
    if 0 in (a.ndim, b.ndim):
        return a * b
    return xp.tensordot(a, b, axes=((-1,), (max(b.ndim - 2, 0),))) if b.ndim > 2 else a @ b


@define("inner")
def _inner(xp: Any, a: Any, b: Any) -> Any:
    a, b = xp.asarray(a), xp.asarray(b)
    return a * b if 0 in (a.ndim, b.ndim) else xp.tensordot(a, b, axes=((-1,), (-1,)))


FUNCTIONS |= {
    "vdot": lambda xp, a, b: xp.sum(xp.conj(xp.reshape(xp.asarray(a), (-1,))) * xp.reshape(xp.asarray(b), (-1,))),
    "outer": lambda xp, a, b: xp.reshape(xp.asarray(a), (-1, 1)) * xp.reshape(xp.asarray(b), (1, -1)),
    "tensordot": lambda xp, a, b, axes=2: xp.tensordot(
        xp.asarray(a), xp.asarray(b), axes=axes if isinstance(axes, int) else tuple(_tuple(each) for each in axes)
    ),
    "kron": lambda xp, a, b: _kron(xp, xp.asarray(a), xp.asarray(b)),
    "linalg.multi_dot": lambda xp, arrays: functools.reduce(lambda a, b: _dot(xp, a, b), arrays),
    "linalg.svd": lambda xp, x, full_matrices=True, compute_uv=True: (
        xp.linalg.svd(x, full_matrices=full_matrices) if compute_uv else xp.linalg.svdvals(x)
    ),
    "linalg.tensordot": lambda xp, a, b, axes=2: FUNCTIONS["tensordot"](xp, a, b, axes),
    "linalg.cond": lambda xp, x, p=2: _norm(xp, x, p or 2, (-2, -1)) * _norm(xp, xp.linalg.inv(x), p or 2, (-2, -1)),
}


@define("cross")
def _cross(xp: Any, a: Any, b: Any, axisa: int = -1, axisb: int = -1, axisc: int = -1, axis: Any = None) -> Any:
    axisa, axisb, axisc = (axisa, axisb, axisc) if axis is None else (axis, axis, axis)
    a, b = xp.moveaxis(xp.asarray(a), axisa, -1), xp.moveaxis(xp.asarray(b), axisb, -1)
    if (a.shape[-1], b.shape[-1]) != (3, 3):
        _refuse("cross", "with vectors of two elements")
    return xp.moveaxis(xp.linalg.cross(*xp.broadcast_arrays(a, b)), -1, axisc)


def _kron(xp: Any, a: Any, b: Any) -> Any:
    ndim = max(a.ndim, b.ndim)
    a, b = (xp.reshape(x, (1,) * (ndim - x.ndim) + tuple(x.shape)) for x in (a, b))
    pairs = [tuple(size for pair in zip(*sides, strict=True) for size in pair)
             for sides in ((a.shape, (1,) * ndim), ((1,) * ndim, b.shape))]  # fmt: skip
    product = xp.reshape(a, pairs[0]) * xp.reshape(b, pairs[1])
    return xp.reshape(product, tuple(m * n for m, n in zip(a.shape, b.shape, strict=True)))


@define("linalg.norm")
def _norm(xp: Any, x: Any, ord: Any = None, axis: Any = None, keepdims: bool = False) -> Any:
    if axis is None and (ord is None or x.ndim == 1):
        return xp.linalg.vector_norm(x, ord=2 if ord is None else ord, keepdims=keepdims)
    axes = _tuple((-2, -1) if axis is None else axis)
    if len(axes) == 1 or ord is None:
        return xp.linalg.vector_norm(x, axis=axes, ord=2 if ord is None else ord, keepdims=keepdims)
    norm = xp.linalg.matrix_norm(xp.moveaxis(x, axes, (-2, -1)), ord=ord)
    kept = sorted(i % x.ndim for i in axes) if keepdims else ()
    return functools.reduce(lambda y, i: xp.expand_dims(y, axis=i), kept, norm)


@define("linalg.lstsq")
def _lstsq(xp: Any, a: Any, b: Any, rcond: Any = None) -> tuple[Any, Any, Any, Any]:
    """Solve by the pseudoinverse; residuals, rank and singular values are those of NumPy."""
    if rcond is not None:
        _refuse("linalg.lstsq", "rcond")
    solution = xp.linalg.pinv(a) @ b
    residuals = xp.reshape(xp.sum(squared_size(xp, b - a @ solution), axis=0), (-1,))[
        : None if a.shape[0] > a.shape[1] else 0
    ]
    return solution, residuals, xp.linalg.matrix_rank(a), xp.linalg.svdvals(a)


def _transform2(name: str, xp: Any, x: Any, s: Any = None, axes: Any = (-2, -1), norm: Any = None) -> Any:
    return call_function(f"fft.{name}n", (x, s, axes, norm), {})


FUNCTIONS |= {f"fft.{name}2": functools.partial(_transform2, name) for name in ("fft", "ifft", "rfft", "irfft")}


@define("einsum")
def _einsum(xp: Any, subscripts: str, *operands: Any, optimize: Any = None) -> Any:
    """Contract the operands from left to right, each pair by one product of matrices."""
    if not isinstance(subscripts, str):
        _refuse("einsum", "in the form of lists of numbers")
    inputs, arrow, output = subscripts.replace(" ", "").partition("->")
    arrays = [xp.asarray(x) for x in operands]
    free = iter(
        [letter for letter in "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz" if letter not in subscripts]
    )
    most = max(
        [x.ndim - len(term) + 3 for term, x in zip(inputs.split(","), arrays, strict=True) if "..." in term], default=0
    )
    dots = "".join(itertools.islice(free, most))
    terms = [
        term.replace("...", dots[most - (x.ndim - len(term) + 3) :] if "..." in term else "")
        for term, x in zip(inputs.split(","), arrays, strict=True)
    ]
    letters = "".join(terms)
    if arrow:
        output = output.replace("...", dots)
    else:
        output = dots + "".join(sorted(c for c in {*letters} - {*dots} if letters.count(c) == 1))
    terms, arrays = map(list, zip(*map(functools.partial(_diagonals, xp), terms, arrays), strict=True))
    sizes = {c: max(x.shape[t.index(c)] for t, x in zip(terms, arrays, strict=True) if c in t) for c in "".join(terms)}
    for i, (term, x) in enumerate(zip(terms, arrays, strict=True)):  # an axis of size one is broadcast, so left out
        single = tuple(k for k, c in enumerate(term) if x.shape[k] < sizes[c])
        terms[i] = "".join(c for k, c in enumerate(term) if k not in single)
        arrays[i] = xp.squeeze(x, axis=single) if single else x
    while len(arrays) > 1:
        term, array = _pair(xp, terms[0], arrays[0], terms[1], arrays[1], {*output, *"".join(terms[2:])})
        terms, arrays = [term, *terms[2:]], [array, *arrays[2:]]
    array, term = _summed(xp, arrays[0], terms[0], {*output})
    return xp.permute_dims(array, tuple(map(term.index, output))) if term != output else array


def _diagonals(xp: Any, term: str, x: Any) -> tuple[str, Any]:
    """Return the operand with the diagonal of axes that have the same letter."""
    for letter in term:
        while term.count(letter) > 1:
            first = term.index(letter)
            second = term.index(letter, first + 1)
            x = xp.linalg.diagonal(xp.moveaxis(x, (first, second), (-2, -1)))
            term = "".join(c for i, c in enumerate(term) if i not in (first, second)) + letter
    return term, x


def _pair(xp: Any, a: str, x: Any, b: str, y: Any, kept: set[str]) -> tuple[str, Any]:
    """Contract two operands: letters of both that are kept are a batch, the others of both are summed."""
    x, a = _summed(xp, x, a, {*b, *kept})
    y, b = _summed(xp, y, b, {*a, *kept})
    batch, summed = [c for c in a if c in b and c in kept], [c for c in a if c in b and c not in kept]
    rows, columns = [c for c in a if c not in b], [c for c in b if c not in a]
    sizes = {**dict(zip(a, x.shape, strict=True)), **dict(zip(b, y.shape, strict=True))}
    shared, *counts = (math.prod(sizes[c] for c in group) for group in (batch, rows, summed, columns))
    left = xp.reshape(xp.permute_dims(x, tuple(map(a.index, batch + rows + summed))), (shared, *counts[:2]))
    right = xp.reshape(xp.permute_dims(y, tuple(map(b.index, batch + summed + columns))), (shared, *counts[1:]))
    term = "".join(batch + rows + columns)
    return term, xp.reshape(xp.matmul(left, right), tuple(sizes[c] for c in term))


def _summed(xp: Any, x: Any, term: str, kept: set[str]) -> tuple[Any, str]:
    axes = tuple(i for i, c in enumerate(term) if c not in kept)
    return (xp.sum(x, axis=axes) if axes else x), "".join(c for c in term if c in kept)


# --- sequences and polynomials ----------------------------------------------------------------------------------------


@define("diff")
def _diff(xp: Any, x: Any, n: int = 1, axis: int = -1, prepend: Any = None, append: Any = None) -> Any:
    shape = tuple(1 if i == axis % x.ndim else size for i, size in enumerate(x.shape))
    ends = {key: xp.asarray(end) for key, end in (("prepend", prepend), ("append", append)) if end is not None}
    ends = {key: xp.astype(end if end.ndim else xp.broadcast_to(end, shape), x.dtype) for key, end in ends.items()}
    return xp.diff(x, axis=axis, n=n, **ends)


@define("unwrap")
def _unwrap(xp: Any, p: Any, discont: Any = None, axis: int = -1, *, period: float = 2.0 * math.pi) -> Any:
    p, half = xp.moveaxis(p, axis, -1), 0.5 * period
    step = xp.diff(p)
    wrapped = (step + half) % period - half
    wrapped = xp.where((wrapped == -half) & (step > 0), half, wrapped)
    jumps = xp.where(xp.abs(step) < (half if discont is None else discont), 0.0, wrapped - step)
    jumps = xp.concat([xp.zeros_like(p[..., :1]), xp.cumulative_sum(jumps, axis=-1)], axis=-1)
    return xp.moveaxis(p + jumps, -1, axis)


@define("convolve")
def _convolve(xp: Any, a: Any, v: Any, mode: Any = "full") -> Any:
    a, v = (FUNCTIONS["atleast_1d"](xp, xp.asarray(x)) for x in (a, v))
    a, v = (v, a) if v.shape[0] > a.shape[0] else (a, v)
    n, m = a.shape[0], v.shape[0]
    products = xp.reshape(_pad(xp, v[:, None] * a, ((0, 0), (0, m))), (-1,))
    full = xp.sum(xp.reshape(products[:-m], (m, n + m - 1)), axis=0)  # of rows, each moved by one to the right
    size = np.convolve(np.ones(n), np.ones(m), mode).shape[0]  # which knows the names and numbers of modes
    start = (n + m - 1 - size) // 2
    return full[start : start + size]


@define("correlate")
def _correlate(xp: Any, a: Any, v: Any, mode: Any = "valid") -> Any:
    a, v = (FUNCTIONS["atleast_1d"](xp, xp.asarray(x)) for x in (a, conjugate(xp, xp.asarray(v))))
    if v.shape[0] > a.shape[0]:
        return xp.flip(_convolve(xp, v, xp.flip(a), mode))
    return _convolve(xp, a, xp.flip(v), mode)


@define("interp")
def _interp(xp: Any, x: Any, points: Any, values: Any, left: Any = None, right: Any = None, period: Any = None) -> Any:
    if period is not None:
        _refuse("interp", "period")
    x, points, values = (xp.asarray(each) for each in (x, points, values))
    last = points.shape[0] - 1
    right_end = xp.clip(xp.searchsorted(points, xp.reshape(x, (-1,)), side="right"), 1, last)
    high = xp.reshape(right_end, tuple(x.shape))
    low = high - 1
    (x0, x1), (y0, y1) = ((xp.getitem(each, low), xp.getitem(each, high)) for each in (points, values))
    result = y0 + (x - x0) * ((y1 - y0) / (x1 - x0))
    result = xp.where(x < points[0], values[0] if left is None else left, result)
    return xp.where(x > points[last], values[last] if right is None else right, result)


@define("trapezoid", "trapz")
def _trapezoid(xp: Any, y: Any, x: Any = None, dx: float = 1.0, axis: int = -1) -> Any:
    y = xp.moveaxis(xp.asarray(y), axis, -1)
    steps = dx if x is None else xp.diff(xp.asarray(x) if np.ndim(x) == 1 else xp.moveaxis(xp.asarray(x), axis, -1))
    return xp.sum(0.5 * (y[..., 1:] + y[..., :-1]) * steps, axis=-1)


@define("gradient")
def _gradient(xp: Any, f: Any, *spacings: Any, axis: Any = None, edge_order: int = 1) -> Any:
    """Take central differences, and one-sided ones of first order at both ends."""
    if edge_order != 1:
        _refuse("gradient", "edge_order=2")
    axes = tuple(range(f.ndim)) if axis is None else _tuple(axis)
    spacings = spacings * len(axes) if len(spacings) == 1 else spacings or (1.0,) * len(axes)
    slopes = []
    for each, spacing in zip(axes, spacings, strict=True):
        y = xp.moveaxis(f, each, -1)
        steps = xp.diff(xp.asarray(spacing)) if np.ndim(spacing) else spacing
        ends = (y[..., 1:] - y[..., :-1]) / steps  # of the intervals
        if np.ndim(spacing):
            inner = (ends[..., 1:] * steps[:-1] + ends[..., :-1] * steps[1:]) / (steps[:-1] + steps[1:])
        else:
            inner = 0.5 * (y[..., 2:] - y[..., :-2]) / steps
        slopes.append(xp.moveaxis(xp.concat([ends[..., :1], inner, ends[..., -1:]], axis=-1), -1, each))
    return tuple(slopes) if len(slopes) != 1 else slopes[0]


@define("polyval")
def _polyval(xp: Any, p: Any, x: Any) -> Any:
    value = 0.0 * xp.asarray(x)
    for coefficient in xp.unstack(xp.asarray(p)):
        value = value * x + coefficient
    return value


@define("vander")
def _vander(xp: Any, x: Any, N: Any = None, increasing: bool = False) -> Any:
    powers = range(x.shape[0] if N is None else N)
    return xp.stack([x**n for n in (powers if increasing else reversed(powers))], axis=1)


@define("linspace")
def _linspace(
    xp: Any, start: Any, stop: Any, num: int = 50, endpoint: bool = True, retstep: bool = False, dtype: Any = None,
    axis: int = 0,
) -> Any:  # fmt: skip
    start, stop = 1.0 * xp.asarray(start), 1.0 * xp.asarray(stop)
    delta = stop - start
    places = np.arange(num, dtype=delta.dtype).reshape(-1, *(1,) * delta.ndim) / max(num - endpoint, 1)
    values = _cast(xp, xp.moveaxis(xp.where(places == 1.0, stop, start + places * delta), 0, axis), dtype)
    return (values, delta / (num - endpoint or math.nan)) if retstep else values


# --- methods ----------------------------------------------------------------------------------------------------------

_METHODS = (
    "sum prod mean std var max min argmax argmin argsort all any cumsum cumprod ravel swapaxes squeeze dot copy clip "
    "round trace diagonal repeat take ptp conj conjugate nonzero searchsorted"
)


def method_of(x: Any, name: str) -> Any:
    """Return a method of NumPy's arrays, or of torch's, with this name for a traced array, or None."""
    if x._namespace.library.name == "torch":
        return functools.partial(call_torch, name, x) if name in OF_TORCH else None
    if name in _METHODS.split():
        return lambda *args, **keywords: call_function(name, (x, *args), keywords)
    return _OTHER_METHODS[name](x) if name in _OTHER_METHODS else None


def _sizes(sizes: tuple[Any, ...]) -> Any:
    return sizes[0] if len(sizes) == 1 else sizes


_OTHER_METHODS: dict[str, Function] = {
    "compress": lambda x: lambda condition, axis=None: call_function("compress", (condition, x, axis), {}),
    "reshape": lambda x: lambda *shape, order="C": call_function("reshape", (x, _sizes(shape), order), {}),
    "transpose": lambda x: lambda *axes: call_function("transpose", (x, _sizes(axes) if axes else None), {}),
    "flatten": lambda x: lambda order="C": x._namespace.asarray(call_function("ravel", (x, order), {}), copy=True),
    "astype": lambda x: lambda dtype, copy=True: x._namespace.astype(x, np.dtype(dtype), copy=copy),
    "real": lambda x: x._namespace.real(x),
    "imag": lambda x: x._namespace.imag(x),
}


# --- torch ------------------------------------------------------------------------------------------------------------


def _logsumexp(xp: Any, x: Any, axis: Any = None, *, keepdims: bool = False) -> Any:
    largest = xp.max(x, axis=axis, keepdims=True)
    largest = xp.where(xp.isinf(largest), 0.0, largest)  # infinity minus infinity would be NaN
    total = xp.log(xp.sum(xp.exp(x - largest), axis=axis, keepdims=True)) + largest
    return total if keepdims else FUNCTIONS["squeeze"](xp, total, axis)


def _log_softmax(xp: Any, x: Any, axis: Any) -> Any:
    x = x - xp.max(x, axis=axis, keepdims=True)
    return x - _logsumexp(xp, x, axis, keepdims=True)


def _sigmoid(xp: Any, x: Any) -> Any:
    power = xp.exp(xp.where(x < 0, x, -x))
    return xp.where(x < 0, power, 1.0) / (1.0 + power)


def _solve(xp: Any, a: Any, b: Any) -> Any:
    """Solve for matrices, or for a stack of vectors, as torch takes arrays of one dimension less."""
    is_stack = b.ndim > 1 and b.shape == a.shape[:-1]
    return xp.linalg.solve(a, b[..., None])[..., 0] if is_stack else xp.linalg.solve(a, b)


_SAME = (
    "sum mean prod amax amin reshape squeeze stack where roll flip cumsum cumprod tile tril triu trace outer dot einsum"
)
# Functions and methods of torch: the name of the one of NumPy that means the same, or the function.
OF_TORCH: dict[str, Any] = {name: name for name in (*_SAME.split(), "matmul", "diagonal", "kron")}
OF_TORCH |= {name.replace("special.", "special_"): name for name in ELEMENTWISE}
OF_TORCH |= {"sub": "subtract", "mul": "multiply", "div": "divide", "neg": "negative", "clamp": "clip"}
OF_TORCH |= {"cat": "concatenate", "view": "reshape", "permute": "transpose", "transpose": "swapaxes"}
OF_TORCH |= {"mm": "matmul", "bmm": "matmul", "mv": "matmul", "unsqueeze": "expand_dims", "logsumexp": _logsumexp}
OF_TORCH |= {f"linalg_{name}": f"linalg.{name}" for name in ("inv", "det", "cholesky", "eigvalsh", "pinv")}
OF_TORCH |= {
    "sigmoid": _sigmoid,
    "relu": lambda xp, x: importlib.import_module("xformer.ops").relu(x),
    "softmax": lambda xp, x, axis: xp.exp(_log_softmax(xp, x, axis)),
    "log_softmax": _log_softmax,
    "linalg_solve": _solve,
}


def call_torch(name: str, *args: Any, **keywords: Any) -> Any:
    """Call a function or a method of torch by its name."""
    names = {"dim": "axis", "dims": "axis", "keepdim": "keepdims", "min": "min", "max": "max"}
    is_default = {key: value is None or (value is False and key != "left") for key, value in keywords.items()}
    given = {key: value for key, value in keywords.items() if not (is_default[key] or key[0] == "_")}
    if len(args) == 3 and type(args[2]) is bool:  # sum(x, dim, keepdim)
        given["keepdim"], args = args[2], args[:2]
    elif len(args) > 2 and name in ("reshape", "view", "permute", "flip"):  # the sizes or axes
        args = (args[0], args[1:])
    if name in ("sum", "mean", "amax", "amin") and [*args[1:], given.get("dim")][0] in ((), []):  # all axes
        given, args = {**given, "dim": None}, args[:1]
    if given.keys() - names:
        raise DifferentiationError(f"{name} of torch on a traced array has no argument {min(given.keys() - names)}")
    given, function = {names[key]: value for key, value in given.items()}, OF_TORCH[name]
    return call_function(function, args, given) if type(function) is str else function(_trace_of(args), *args, **given)
