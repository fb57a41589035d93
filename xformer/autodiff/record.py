"""The functions of a trace: each computes in the base namespace, appends a record to the tape and wraps the result.

There are four kinds: functions with a rule; functions of a list of arrays; unstack, which has several outputs; and
functions without a rule, whose result is a constant unless they have a decomposition. `_one_array` and `_two_arrays`
are fast paths for the calls that make up most of a training step; `_any_arrays` handles every call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from xformer.autodiff.rule import DECOMPOSITIONS, NOT_DIFFERENTIABLE, Pull, Rule
from xformer.autodiff.tracer import InnerArray, Tracer

Function = Callable[..., Any]
_NO_KEYWORDS: dict[str, Any] = {}


def bind_rule(trace: Any, name: str, function: Function, rule: Rule) -> Function:
    """Return the traced version of a function with a rule."""
    general = innermost(name, _any_arrays(trace, name, function, rule))
    if trace.trace_level > 1:
        return _named(function, general)
    if rule.positions == (0,):
        return _named(function, _one_array(trace, name, function, rule, general))
    if rule.positions == (0, 1):
        return _named(function, _two_arrays(trace, function, rule, general))
    return _named(function, general)


def _named(function: Function, call: Function) -> Function:
    return functools.wraps(function)(call) if hasattr(function, "__name__") else call


def _one_array(trace: Any, name: str, function: Function, rule: Rule, general: Function) -> Function:
    """Return the fast path for f(x) and f(x, axis=0), where x is a tracked array of this trace."""
    tape, floating, ((select, pull),) = trace.tape, trace.floating, rule.steps

    def with_static(x: Tracer, static: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        try:
            static, keywords = trace.unwrap(static), _unwrap_keywords(trace, name, keywords)
        except InnerArray as error:
            return getattr(error.trace, name)(x, *static, **keywords)
        output = function(x._value, *static, **keywords)
        return trace.record(output, pull, (x._index,), (select((x._value, output)) + static, keywords))

    def call(x: Any, /, *static: Any, **keywords: Any) -> Any:
        if type(x) is not Tracer or x._namespace is not trace or x._index < 0:
            return general(x, *static, **keywords)
        if static or keywords:
            return with_static(x, static, keywords)
        value = x._value
        output = function(value)
        if output.dtype not in floating:
            return trace.record(output, pull, (x._index,), (select((value, output)), _NO_KEYWORDS))
        tape.append((pull, (x._index,), (select((value, output)), _NO_KEYWORDS), output.shape, output.dtype))
        return Tracer(output, trace, len(tape) - 1)

    return call


def _two_arrays(trace: Any, function: Function, rule: Rule, general: Function) -> Function:
    """Return the fast path for f(a, b), each an array of this trace, a plain array or a scalar."""
    tape, floating, (first, second) = trace.tape, trace.floating, rule.steps
    select_first, pull_first, select_second, pull_second, pull_both = *first, *second, rule.pull_all

    def call(a: Any, b: Any, /, *static: Any, **keywords: Any) -> Any:
        i = j = -1
        x, y = a, b
        if type(a) is Tracer and a._namespace is trace:
            x, i = a._value, a._index
        if type(b) is Tracer and b._namespace is trace:
            y, j = b._value, b._index
        if type(x) is Tracer or type(y) is Tracer or static or keywords:
            return general(a, b, *static, **keywords)
        output = function(x, y)
        pull: Pull
        parents: tuple[int, ...]
        residuals: tuple[Any, ...]
        if j < 0:
            if i < 0:
                return Tracer(output, trace, -1)
            pull, parents, residuals = pull_first, (i,), (select_first((x, y, output)), _NO_KEYWORDS)
        elif i < 0:
            pull, parents, residuals = pull_second, (j,), (select_second((x, y, output)), _NO_KEYWORDS)
        else:
            pool = (x, y, output)
            pull, parents, residuals = pull_both, (i, j), (select_first(pool), select_second(pool), _NO_KEYWORDS)
        if output.dtype not in floating:
            return trace.record(output, pull, parents, residuals)
        tape.append((pull, parents, residuals, output.shape, output.dtype))
        return Tracer(output, trace, len(tape) - 1)

    return call


def _unwrap_keywords(trace: Any, name: str, keywords: dict[str, Any]) -> dict[str, Any]:
    for value in keywords.values():
        if trace.depends(value):
            raise NotImplementedError(f"{name} got a traced array by keyword; pass arrays by position")
    return {key: trace.unwrap(value) for key, value in keywords.items()} if keywords else _NO_KEYWORDS


def _any_arrays(trace: Any, name: str, function: Function, rule: Rule) -> Function:
    """Return the function for calls of any kind."""
    positions, unwrap = rule.positions, trace.unwrap

    def call(*args: Any, **keywords: Any) -> Any:
        keywords = _unwrap_keywords(trace, name, keywords)
        values = [unwrap(argument) for argument in args]
        output = function(*values, **keywords)
        parents = [trace.position(args[i]) for i in positions if i < len(args)]
        if max(parents, default=-1) < 0:
            return trace.wrap(output)
        static = tuple(value for i, value in enumerate(values) if i not in positions)
        pool = (*(values[i] for i in positions), output)
        return trace.record(output, *rule.plan(parents, pool, static, keywords))

    return call


def bind_sequence(trace: Any, name: str, function: Function, formula: Function) -> Function:
    """Return the traced version of concat or stack, whose inputs are a list."""

    def pull(xp: Any, g: Any, residuals: Any) -> Any:
        shapes, keywords = residuals
        return formula(xp, g, shapes, **keywords)

    def call(arrays: Any, /, **keywords: Any) -> Any:
        values = [trace.unwrap(array) for array in arrays]
        output = function(values, **keywords)
        parents = [trace.position(array) for array in arrays]
        if max(parents, default=-1) < 0:
            return trace.wrap(output)
        return trace.record(output, pull, parents, ([tuple(value.shape) for value in values], keywords))

    return _named(function, innermost(name, call))


def bind_unstack(trace: Any, function: Function) -> Function:
    """Return the traced version of unstack; the VJP of slicing would allocate an array of zeros for each slice."""

    def pull(xp: Any, cotangents: Any, axis: int) -> Any:
        used = next(g for g in cotangents if g is not None)
        return (xp.stack([xp.zeros_like(used) if g is None else g for g in cotangents], axis=axis),)

    def call(x: Any, /, *, axis: int = 0) -> tuple[Any, ...]:
        outputs = function(trace.unwrap(x), axis=axis)
        if not outputs or trace.position(x) < 0:
            return tuple(map(trace.wrap, outputs))
        return trace.record_outputs(outputs, pull, (trace.position(x),), axis)

    return _named(function, innermost("unstack", call))


def bind_without_rule(trace: Any, name: str, function: Function) -> Function:
    """Return the traced version of any other function: a constant, a decomposition, or an error."""
    is_constant = name in NOT_DIFFERENTIABLE

    def call(*args: Any, **keywords: Any) -> Any:
        if not is_constant and any(map(trace.depends, (*args, *keywords.values()))):
            if name in DECOMPOSITIONS:
                return DECOMPOSITIONS[name](trace, *args, **keywords)
            raise NotImplementedError(
                f"{name} has no derivative rule; add one in xformer/autodiff/rules/, or use stop_gradient(x)"
            )
        unwrapped = {key: trace.unwrap(value) for key, value in keywords.items()}
        return trace.wrap(function(*map(trace.unwrap, args), **unwrapped))

    return _named(function, innermost(name, call))


def innermost(name: str, call: Function) -> Function:
    """Let an inner trace record the call if one of its arrays is among the arguments."""

    def dispatch(*args: Any, **keywords: Any) -> Any:
        try:
            return call(*args, **keywords)
        except InnerArray as error:
            return getattr(error.trace, name)(*args, **keywords)

    return dispatch
