"""The functions of a trace: each computes below the trace, leaves a record on the tape, and wraps what came out.

There are four kinds: functions with a rule; functions of a list of arrays; unstack, whose results are many; and
functions without a rule, whose result is constant unless a decomposition stands in for them. `_one_array` and
`_two_arrays` are the short way for the calls that make up most of a training step; everything they do, `_any_arrays`
does for any call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from xformer.autodiff.rule import DECOMPOSITIONS, NOT_DIFFERENTIABLE, Pull, Rule
from xformer.autodiff.tracer import InnerArray, Tracer

Function = Callable[..., Any]
_NO_KEYWORDS: dict[str, Any] = {}


def recorder(trace: Any, name: str, function: Function, rule: Rule) -> Function:
    """Make the traced version of a function with a rule."""
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
    """The short way for f(x), and for f(x, axis=0), of a tracked array of this trace."""
    tape, floating, ((keep, pull),) = trace.tape, trace.floating, rule.steps

    def with_static(x: Tracer, static: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        try:
            static, keywords = trace.unwrap(static), _unwrap_keywords(trace, name, keywords)
        except InnerArray as found:
            return getattr(found.trace, name)(x, *static, **keywords)
        output = function(x._value, *static, **keywords)
        return trace.record(output, pull, (x._index,), (keep((x._value, output)) + static, keywords))

    def call(x: Any, /, *static: Any, **keywords: Any) -> Any:
        if type(x) is not Tracer or x._namespace is not trace or x._index < 0:
            return general(x, *static, **keywords)
        if static or keywords:
            return with_static(x, static, keywords)
        value = x._value
        output = function(value)
        if output.dtype not in floating:
            return trace.record(output, pull, (x._index,), (keep((value, output)), _NO_KEYWORDS))
        tape.append((pull, (x._index,), (keep((value, output)), _NO_KEYWORDS), output.shape, output.dtype))
        return Tracer(output, trace, len(tape) - 1)

    return call


def _two_arrays(trace: Any, function: Function, rule: Rule, general: Function) -> Function:
    """The short way for f(a, b), each an array of this trace, a plain array or a scalar."""
    tape, floating, (first, second) = trace.tape, trace.floating, rule.steps
    keep_first, pull_first, keep_second, pull_second, pull_both = *first, *second, rule.pull_all

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
        saved: tuple[Any, ...]
        if j < 0:
            if i < 0:
                return Tracer(output, trace, -1)
            pull, parents, saved = pull_first, (i,), (keep_first((x, y, output)), _NO_KEYWORDS)
        elif i < 0:
            pull, parents, saved = pull_second, (j,), (keep_second((x, y, output)), _NO_KEYWORDS)
        else:
            pool = (x, y, output)
            pull, parents, saved = pull_both, (i, j), (keep_first(pool), keep_second(pool), _NO_KEYWORDS)
        if output.dtype not in floating:
            return trace.record(output, pull, parents, saved)
        tape.append((pull, parents, saved, output.shape, output.dtype))
        return Tracer(output, trace, len(tape) - 1)

    return call


def _unwrap_keywords(trace: Any, name: str, keywords: dict[str, Any]) -> dict[str, Any]:
    for value in keywords.values():
        if trace.depends(value):
            raise NotImplementedError(f"{name} got a traced array by keyword; pass arrays by position")
    return {key: trace.unwrap(value) for key, value in keywords.items()} if keywords else _NO_KEYWORDS


def _any_arrays(trace: Any, name: str, function: Function, rule: Rule) -> Function:
    """The long way, for any call."""
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


def sequence_recorder(trace: Any, name: str, function: Function, formula: Function) -> Function:
    """Make the traced version of concat and stack, whose inputs come in a list."""

    def pull(xp: Any, g: Any, saved: Any) -> Any:
        shapes, keywords = saved
        return formula(xp, g, shapes, **keywords)

    def call(arrays: Any, /, **keywords: Any) -> Any:
        values = [trace.unwrap(array) for array in arrays]
        output = function(values, **keywords)
        parents = [trace.position(array) for array in arrays]
        if max(parents, default=-1) < 0:
            return trace.wrap(output)
        return trace.record(output, pull, parents, ([tuple(value.shape) for value in values], keywords))

    return _named(function, innermost(name, call))


def unstack_recorder(trace: Any, function: Function) -> Function:
    """Make the traced version of unstack: slicing instead would cost a full array of zeros for every slice."""

    def pull(xp: Any, cotangents: Any, axis: int) -> Any:
        used = next(g for g in cotangents if g is not None)
        return (xp.stack([xp.zeros_like(used) if g is None else g for g in cotangents], axis=axis),)

    def call(x: Any, /, *, axis: int = 0) -> tuple[Any, ...]:
        outputs = function(trace.unwrap(x), axis=axis)
        if not outputs or trace.position(x) < 0:
            return tuple(map(trace.wrap, outputs))
        return trace.record_several(outputs, pull, (trace.position(x),), axis)  # type: ignore[no-any-return]

    return _named(function, innermost("unstack", call))


def without_rule(trace: Any, name: str, function: Function) -> Function:
    """Make the traced version of any other function: a constant, a decomposition, or an error."""
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
    """Give way to an inner trace: when an array of one is among the arguments, that trace must record the call."""

    def dispatch(*args: Any, **keywords: Any) -> Any:
        try:
            return call(*args, **keywords)
        except InnerArray as found:
            return getattr(found.trace, name)(*args, **keywords)

    return dispatch
