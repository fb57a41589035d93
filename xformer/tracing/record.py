"""The functions of a trace: each computes in the base namespace, appends a record to the tape and wraps the result.

There are four kinds: functions with a rule; functions of a list of arrays; unstack, which has several outputs; and
functions without a rule, whose result is a constant unless they have a decomposition. `_one_array` and `_two_arrays`
are fast paths for the calls that make up most of a training step; `_any_arrays` handles every call.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

from xformer import hints
from xformer.errors import DifferentiationError
from xformer.tracing.rule import DECOMPOSITIONS, NOT_DIFFERENTIABLE, Pull, Rule
from xformer.tracing.tracer import BINARY_OPERATORS, OPERATORS, PLAIN, InnerArray, Tracer
from xformer.tree import is_array

Function = Callable[..., Any]
_NO_KEYWORDS: dict[str, Any] = {}
# Functions whose results may share memory with their first argument; broadcast_arrays decomposes into such calls.
_VIEWS = {
    *("asarray", "astype", "broadcast_arrays", "broadcast_to", "conj", "expand_dims", "flip", "from_dlpack", "getitem"),
    *("matrix_transpose", "moveaxis", "operator_pos", "permute_dims", "positive", "real", "reshape", "squeeze"),
    "to_device",
}


def bind_rule(trace: Any, name: str, function: Function, rule: Rule) -> Function:
    """Return the traced version of a function with a rule."""
    general = functools.cache(lambda: innermost(trace, name, _any_arrays(trace, name, function, rule)))
    if trace.trace_level == 1 and rule.positions == (0,):
        return _one_array(trace, name, function, rule, general)
    if trace.trace_level == 1 and rule.positions == (0, 1):
        return _two_arrays(trace, function, rule, general)
    return general()


def _one_array(trace: Any, name: str, function: Function, rule: Rule, general: Callable[[], Function]) -> Function:
    """Return the fast path for f(x) and f(x, axis=0), where x is a tracked array of this trace."""
    tape, floating, ((select, pull),) = trace.tape, trace.floating, rule.steps
    is_view = name in _VIEWS

    def with_static(x: Tracer, static: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        try:
            static, keywords = _unwrap_static(trace, name, static), _unwrap_static(trace, name, keywords)
        except InnerArray as error:
            return getattr(error.trace, name)(x, *static, **keywords)
        output = function(x._value, *static, **keywords)
        result = trace.record(output, pull, (x._index,), (select((x._value, output)) + static, keywords))
        return _as_view(x, result, name, static, keywords) if is_view and not keywords.get("copy") else result

    def call(x: Any, /, *static: Any, **keywords: Any) -> Any:
        if type(x) is not Tracer or x._namespace is not trace or x._index < 0:
            return general()(x, *static, **keywords)
        if static or keywords or is_view:
            return with_static(x, static, keywords)
        value = x._value
        output = function(value)
        if output.dtype not in floating:
            return trace.record(output, pull, (x._index,), (select((value, output)), _NO_KEYWORDS))
        tape.append((pull, (x._index,), (select((value, output)), _NO_KEYWORDS), output.shape, output.dtype))
        return Tracer(output, trace, len(tape) - 1)

    return call


def _two_arrays(trace: Any, function: Function, rule: Rule, general: Callable[[], Function]) -> Function:
    """Return the fast path for f(a, b), each an array of this trace, a plain array or a scalar."""
    tape, floating, (first, second) = trace.tape, trace.floating, rule.steps
    select_first, pull_first, select_second, pull_second, pull_both = *first, *second, rule.pull_all
    keeps_first, keeps_second = rule.keeps

    def call(a: Any, b: Any, /, *static: Any, **keywords: Any) -> Any:
        i = j = -1
        x, y = a, b
        if type(a) is Tracer and a._namespace is trace:
            x, i = a._value, a._index
        elif type(a) in (list, tuple):
            return general()(a, b, *static, **keywords)
        if type(b) is Tracer and b._namespace is trace:
            y, j = b._value, b._index
        elif type(b) in (list, tuple):
            return general()(a, b, *static, **keywords)
        if type(x) is Tracer or type(y) is Tracer or static or keywords:
            return general()(a, b, *static, **keywords)
        output = function(x, y)
        pull: Pull
        parents: tuple[int, ...]
        residuals: tuple[Any, ...]
        if j < 0:
            if i < 0:
                return Tracer(output, trace, -1)
            if keeps_second and type(b) is not float:
                y = trace.keep(b)
            pull, parents, residuals = pull_first, (i,), (select_first((x, y, output)), _NO_KEYWORDS)
        elif i < 0:
            if keeps_first and type(a) is not float:
                x = trace.keep(a)
            pull, parents, residuals = pull_second, (j,), (select_second((x, y, output)), _NO_KEYWORDS)
        else:
            pool = (x, y, output)
            pull, parents, residuals = pull_both, (i, j), (select_first(pool), select_second(pool), _NO_KEYWORDS)
        if output.dtype not in floating:
            return trace.record(output, pull, parents, residuals)
        tape.append((pull, parents, residuals, output.shape, output.dtype))
        return Tracer(output, trace, len(tape) - 1)

    return call


def _unwrap_static(trace: Any, name: str, arguments: Any) -> Any:
    """Unwrap positional or keyword arguments that have no derivative."""
    values = tuple(arguments.values()) if isinstance(arguments, dict) else arguments
    if trace.depends(values):
        hint = "by keyword; pass arrays by position" if isinstance(arguments, dict) else "as an argument without a rule"
        raise DifferentiationError(f"{name} got a traced array {hint}, or use stop_gradient(x)")
    if isinstance(arguments, dict):
        if "dim" in arguments or "keepdim" in arguments:  # names of torch, which the derivative rules lack
            raise TypeError(f"{name} got dim= or keepdim= of torch; use axis= and keepdims=")
        return {key: trace.keep(value) for key, value in arguments.items()}
    return trace.keep(arguments)


def _as_view(source: Any, result: Any, name: str, args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    """Note where a result comes from that may share the memory of its first argument; return it."""
    if type(result) is not Tracer:
        return result
    value, given = result._value, source._value if type(source) is Tracer else source
    if value is not given and getattr(value, "base", value) is None:
        return result  # NumPy says that it owns its memory
    if type(source) is not Tracer:
        result._origin = PLAIN if is_array(source) else None
    elif source._origin is PLAIN or source._namespace is not result._namespace:
        result._origin = PLAIN
    else:
        source.add_view(result, name, args, keywords)
    return result


def _any_arrays(trace: Any, name: str, function: Function, rule: Rule) -> Function:
    """Return the function for calls of any kind."""
    positions, kept = rule.positions, rule.kept

    def call(*args: Any, **keywords: Any) -> Any:
        keywords = _unwrap_static(trace, name, keywords)
        static = _unwrap_static(trace, name, tuple(args[i] for i in range(len(args)) if i not in positions))
        values = [trace.keep(x) if i in kept else trace.unwrap(x) for i, x in enumerate(args)]
        output = function(*values, **keywords)
        parents = [trace.position(args[i]) for i in positions if i < len(args)]
        if max(parents, default=-1) < 0:
            result = trace.wrap(output)
        else:
            pool = (*(values[i] for i in positions), output)
            result = trace.record(output, *rule.plan(parents, pool, static, keywords))
        if name in _VIEWS and not keywords.get("copy"):
            return _as_view(args[0], result, name, static, keywords)
        return result

    return call


def bind_sequence(trace: Any, name: str, function: Function, formula: Function) -> Function:
    """Return the traced version of concat or stack, whose inputs are a list."""

    def pull(xp: Any, g: Any, residuals: Any) -> Any:
        shapes, keywords = residuals
        return formula(xp, g, shapes, **keywords)

    def call(arrays: Any, /, **keywords: Any) -> Any:
        arrays = [x if is_array(x) else trace.asarray(x) for x in map(trace.stacked, arrays)]
        values = [trace.unwrap(array) for array in arrays]
        output = function(values, **keywords)
        parents = [trace.position(array) for array in arrays]
        if max(parents) < 0:
            return trace.wrap(output)
        return trace.record(output, pull, parents, ([tuple(value.shape) for value in values], keywords))

    return innermost(trace, name, call, has_list=True)


def bind_unstack(trace: Any, function: Function) -> Function:
    """Return the traced version of unstack; the VJP of slicing would allocate an array of zeros for each slice."""

    def pull(xp: Any, cotangents: Any, axis: int) -> Any:
        used = next(g for g in cotangents if g is not None)
        return (xp.stack([xp.zeros_like(used) if g is None else g for g in cotangents], axis=axis),)

    def call(x: Any, /, *, axis: int = 0) -> tuple[Any, ...]:
        outputs = function(trace.unwrap(x), axis=axis)
        if not outputs or trace.position(x) < 0:
            results = map(trace.wrap, outputs)
        else:
            results = trace.record_outputs(outputs, pull, (trace.position(x),), axis)
        before = (slice(None),) * (axis % x.ndim)
        return tuple([_as_view(x, y, "getitem", ((*before, i, ...),), {}) for i, y in enumerate(results)])

    return innermost(trace, "unstack", call)


def bind_without_rule(trace: Any, name: str, function: Function) -> Function:
    """Return the traced version of any other function: a constant, a decomposition, or an error."""
    is_constant = name in NOT_DIFFERENTIABLE

    def call(*args: Any, **keywords: Any) -> Any:
        if not is_constant and (name in _VIEWS or any(map(trace.depends, (*args, *keywords.values())))):
            if name in DECOMPOSITIONS:
                return DECOMPOSITIONS[name](trace, *args, **keywords)
            hint = hints.ARRAYS.get(name, "define one with xformer.tracing.defvjp, or use stop_gradient(x)")
            raise DifferentiationError(f"{name} has no derivative rule; {hint}")
        unwrapped = {key: trace.unwrap(value) for key, value in keywords.items()}
        return trace.wrap(function(*map(trace.unwrap, args), **unwrapped))

    return innermost(trace, name, call)


def innermost(trace: Any, name: str, call: Function, *, has_list: bool = False) -> Function:
    """Stack lists of traced arrays, and let an inner trace record the call if one of its arrays is an argument.

    The first argument of concat and stack is a list of arrays, which is not stacked.
    """

    def dispatch(*args: Any, **keywords: Any) -> Any:
        try:
            return call(*(args if has_list else map(trace.stacked, args)), **keywords)
        except InnerArray as error:
            return getattr(error.trace, name)(*args, **keywords)

    return dispatch


# --- functions of the base namespace ----------------------------------------------------------------------------------

_PYTHON_OPERATORS: dict[str, Function] = {f"operator_{name}": getattr(operator, f"__{name}__") for name in OPERATORS}


def base_function(base: Any, name: str) -> Any:
    """Return the function called `name` in the base namespace of a trace; an enclosing trace knows all names itself."""
    if base.is_trace:
        return getattr(base, name)
    if name in _PYTHON_OPERATORS:
        return getattr(base, name, _PYTHON_OPERATORS[name])
    if name in _OWN_FUNCTIONS:
        return functools.partial(_OWN_FUNCTIONS[name], base)
    return getattr(base, name)


def set_item(xp: Any, x: Any, value: Any, key: Any) -> Any:
    """Return a copy of `x` with `value` at `key`."""
    if xp.is_trace:
        return xp.setitem(x, value, key)
    return xp.set_item(x, value, key)


def _get_item(xp: Any, x: Any, key: Any) -> Any:
    return x[key]


def _to_device(xp: Any, x: Any, device: Any, *, stream: Any = None) -> Any:
    from array_api_compat import to_device  # the one place where arrays change device inside a trace

    return to_device(x, device, stream=stream)


def _in_place(name: str) -> Function:
    """Return the function of (xp, x, other) that computes in a new array what `x op= other` leaves in x."""
    compute, update = getattr(operator, f"__{name}__"), getattr(operator, f"__i{name}__")

    def inplace(xp: Any, x: Any, other: Any, /) -> Any:
        result = compute(x, other)
        facts = ("dtype", "shape", "strides", "__class__")  # NumPy returns a number for an array without axes
        if all(getattr(result, fact, None) == getattr(x, fact, None) for fact in facts):
            return result
        return update(xp.asarray(x, copy=True), other)  # which casts to the dtype of x, or raises

    return inplace


_OWN_FUNCTIONS: dict[str, Function] = {"getitem": _get_item, "setitem": set_item, "to_device": _to_device}
_OWN_FUNCTIONS |= {f"inplace_{name}": _in_place(name) for name in BINARY_OPERATORS}
