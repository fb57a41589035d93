"""Differentiation as a namespace: the functions of a library, each leaving a record on a tape.

One `DiffNamespace` is one trace. `array_namespace(tracer)` returns it, so code written against the standard runs
unchanged; its functions unwrap tracers, call the namespace below (a library, or the enclosing trace: that is how
higher orders work), and append a `Record`. See README.md in this folder.
"""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

from xformer import gaps
from xformer.autodiff.rule import COMPOSITES, NOT_DIFFERENTIABLE, RULES, SEQUENCE_RULES, Record, Rule
from xformer.autodiff.tracer import BINARY_OPERATORS, COMPARISONS, UNARY_OPERATORS, Tracer
from xformer.namespace import array_namespace, dtype_name, is_floating, library, trace_level

_ACTIVE: ContextVar[DiffNamespace | None] = ContextVar("active_trace", default=None)

# The function whose derivative each operator shares.
_RULE_OF_OPERATOR = {"add": "add", "sub": "subtract", "mul": "multiply", "truediv": "divide", "mod": "remainder",
                     "pow": "pow", "matmul": "matmul", "neg": "negative", "pos": "positive", "abs": "abs"}  # fmt: skip
_PYTHON_OPERATORS: dict[str, Callable[..., Any]] = {
    f"operator_{name}": getattr(operator, f"__{name}__")
    for name in (*BINARY_OPERATORS, *COMPARISONS, *UNARY_OPERATORS)
}


class DiffNamespace:
    """An Array API namespace whose functions record how to pull cotangents back.

    base: the namespace it computes in; trace_level: 1 for a first derivative, 2 for a derivative of that, ...
    """

    def __init__(self, base: Any) -> None:
        self.base = base
        self.trace_level = trace_level(base) + 1
        # array-api-compat takes namespaces of one name for one and the same: the level must be in the name.
        self.__name__ = f"{base.__name__}.diff{self.trace_level}"
        self.tape: list[Record] = []
        self.is_closed = False

    def __repr__(self) -> str:
        return f"<differentiating namespace {self.__name__}>"

    def __getattr__(self, name: str) -> Any:
        """Bind a function on first use; a trace uses only some twenty of the two hundred."""
        if name.startswith("__") and name != "__array_namespace_info__":
            return getattr(self.base, name)
        if self.is_closed:
            raise RuntimeError(
                f"a traced array was used (by {name!r}) after its value_and_grad/vjp call had ended; "
                "return it from the function instead of storing it elsewhere"
            )
        value = self._bind(name)
        setattr(self, name, value)
        return value

    def _bind(self, name: str) -> Any:
        if name in COMPOSITES:
            return functools.partial(COMPOSITES[name], self)
        function = _base_function(self.base, name)
        rule = RULES.get(_RULE_OF_OPERATOR.get(name.removeprefix("operator_"), name))
        if rule is not None and (name in RULES or name in _PYTHON_OPERATORS):
            return _recorder(self, function, rule)
        if name in SEQUENCE_RULES:
            return _sequence_recorder(self, function, SEQUENCE_RULES[name])
        if not callable(function) or isinstance(function, type):
            return function  # dtypes, constants
        return _constant_function(self, function, name)

    # --- lifting and lowering ------------------------------------------------------------------------------------

    def leaf(self, value: Any) -> Tracer:
        """Make an array a differentiable input of the trace; integers and booleans become constants."""
        if not is_floating(value.dtype):
            return Tracer(value, self, -1)
        self.tape.append(Record(None, (), None, tuple(value.shape), value.dtype))
        return Tracer(value, self, len(self.tape) - 1)

    def lift(self, value: Any) -> Any:
        """Wrap arrays (also inside tuples and lists) as constants of the trace; leave everything else."""
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*map(self.lift, value))
        if isinstance(value, tuple | list):
            return type(value)(map(self.lift, value))
        if type(value) is not Tracer and hasattr(value, "dtype") and hasattr(value, "shape"):
            return Tracer(value, self, -1)
        if type(value) is Tracer and value._namespace is not self:
            return Tracer(value, self, -1)
        return value

    def lower(self, value: Any) -> Any:
        """Unwrap constants of this trace inside indices, lists and keywords."""
        if type(value) is Tracer:
            return self.unwrap(value)
        if isinstance(value, tuple | list) and not hasattr(value, "_fields"):
            return type(value)(map(self.lower, value))
        return value

    def unwrap(self, tracer: Tracer) -> Any:
        """The value below; an outer trace's tracer is a constant here, an ended trace's is an error."""
        if tracer._namespace is self:
            return tracer._value
        if tracer._namespace.is_closed:
            tracer._namespace.__getattr__("a later trace")
        return tracer

    def close(self) -> None:
        """End the trace: free the tape at once, and make arrays that escaped raise when they are used.

        The bound functions and the namespace refer to each other; without this, only the garbage collector would
        free what they hold.
        """
        kept = {name: self.__dict__[name] for name in ("base", "trace_level", "__name__")}
        self.tape.clear()
        self.__dict__.clear()
        self.__dict__.update(kept, tape=[], is_closed=True)

    def record(self, output: Any, pull: Any, parents: Any, saved: Any) -> Any:
        """Append one record for `output` and wrap it."""
        if not is_floating(output.dtype):
            if dtype_name(output.dtype).startswith("complex"):
                raise NotImplementedError("derivatives of complex results are not supported; keep arrays real")
            return Tracer(output, self, -1)
        tape = self.tape
        tape.append(Record(pull, parents, saved, tuple(output.shape), output.dtype))
        return Tracer(output, self, len(tape) - 1)

    def unstack(self, x: Any, /, *, axis: int = 0) -> tuple[Any, ...]:
        """Split along an axis: the one standard function of several outputs that is recorded as such."""
        value = self.lower(x)
        outputs = _base_function(self.base, "unstack")(value, axis=axis)
        if type(x) is not Tracer or x._namespace is not self or x._index < 0:
            return tuple(map(self.lift, outputs))
        return self.record_several(outputs, _unstack_pull, (x._index,), axis)

    def record_several(self, outputs: Any, pull: Any, parents: Any, saved: Any) -> tuple[Tracer, ...]:
        """Append one record for several outputs; `pull` gets a list of their cotangents, zeros where unused.

        The outputs after the first only hold their place on the tape: the sweep reaches the first of them last.
        """
        first = len(self.tape)
        shapes = [(tuple(output.shape), output.dtype, output) for output in outputs]
        for position, (shape, dtype, _) in enumerate(shapes):
            if position == 0:
                self.tape.append(Record(_pull_several, parents, (pull, saved, shapes), shape, dtype))
            else:
                self.tape.append(Record(None, (), None, shape, dtype))
        return tuple(Tracer(output, self, first + position) for position, output in enumerate(outputs))


def _pull_several(xp: Any, cotangents: Any, saved: Any, parents: Any) -> Any:
    """Fill in zeros for outputs that nothing used, then pull all cotangents back at once."""
    pull, inner, shapes = saved
    filled = [
        xp.zeros(shape, dtype=dtype, device=output.device) if g is None else g
        for g, (shape, dtype, output) in zip(cotangents, shapes, strict=True)
    ]
    return pull(xp, filled, inner, parents)


def _unstack_pull(xp: Any, cotangents: Any, axis: int, parents: Any) -> Any:
    return (xp.stack(cotangents, axis=axis),)


def _base_function(base: Any, name: str) -> Any:
    """Find what a name means below the trace: an operator, a gap of the standard, or the library's own function."""
    if name in _PYTHON_OPERATORS:
        return _PYTHON_OPERATORS[name]
    if name in gaps.NAMES:
        return gaps.function(base, name)
    if name in _ITEM_FUNCTIONS:
        return _ITEM_FUNCTIONS[name]
    return getattr(base, name)


def _set_item(x: Any, value: Any, key: Any) -> Any:
    """Return a copy of `x` with `value` written at `key`."""
    if library(array_namespace(x)) == "jax" and trace_level(array_namespace(x)) == 0:
        return x.at[key].set(value)
    copy = array_namespace(x).asarray(x, copy=True)
    copy[key] = value
    return copy


def _to_device(x: Any, device: Any, *, stream: Any = None) -> Any:
    from array_api_compat import to_device  # the one place where arrays change device inside a trace

    return to_device(x, device, stream=stream)


_ITEM_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "getitem": operator.getitem,
    "setitem": _set_item,
    "to_device": _to_device,
}


# --- the closures that record ----------------------------------------------------------------------------------------


def _recorder(namespace: DiffNamespace, function: Callable[..., Any], rule: Rule) -> Callable[..., Any]:
    """Make the traced version of a function with a rule."""
    positions, lower = rule.positions, namespace.lower
    last = positions[-1] + 1

    def call(*args: Any, **keywords: Any) -> Any:
        values = list(args)
        parents = []
        deeper: Any = None
        for position in positions:
            argument = args[position]
            if type(argument) is not Tracer:
                parents.append(-1)
            elif argument._namespace is namespace:
                parents.append(argument._index)
                values[position] = argument._value
            else:
                namespace.unwrap(argument)
                parents.append(-1)
                if argument._namespace.trace_level > namespace.trace_level:
                    deeper = argument._namespace
        if deeper is not None:  # an inner trace's array met this trace's function: the inner trace must record
            return getattr(deeper, rule.name)(*args, **keywords)
        static = [lower(args[i]) for i in range(len(args)) if i not in positions]
        if static:
            remaining = iter(static)
            values = [values[i] if i in positions else next(remaining) for i in range(len(args))]
        if keywords:
            keywords = {name: lower(value) for name, value in keywords.items()}
        output = function(*values, **keywords)
        if max(parents) < 0:
            return Tracer(output, namespace, -1)
        inputs = [values[position] for position in positions]
        saved = (rule.save(inputs, output, parents), static, keywords)
        return namespace.record(output, rule.pull, parents, saved)

    def checked(*args: Any, **keywords: Any) -> Any:
        if len(args) < last:
            # Too few arguments: let the library say so in its own words.
            return namespace.lift(function(*map(lower, args), **keywords))
        return call(*args, **keywords)

    return functools.wraps(function)(checked) if hasattr(function, "__name__") else checked


def _sequence_recorder(
    namespace: DiffNamespace, function: Callable[..., Any], formula: Callable[..., Any]
) -> Callable[..., Any]:
    """Make the traced version of concat and stack, whose inputs come in a list."""

    def pull(xp: Any, g: Any, saved: Any, parents: Any) -> Any:
        shapes, keywords = saved
        return formula(xp, g, shapes, **keywords)

    @functools.wraps(function)
    def call(arrays: Any, /, **keywords: Any) -> Any:
        arrays = list(arrays)
        values = [namespace.lower(array) for array in arrays]
        tracked = [type(array) is Tracer and array._namespace is namespace for array in arrays]
        parents = [array._index if mine else -1 for array, mine in zip(arrays, tracked, strict=True)]
        output = function(values, **keywords)
        if max(parents, default=-1) < 0:
            return Tracer(output, namespace, -1)
        return namespace.record(output, pull, parents, ([tuple(value.shape) for value in values], keywords))

    return call


def _constant_function(namespace: DiffNamespace, function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Make the traced version of a function without a derivative: its result is a constant."""
    allowed = name in NOT_DIFFERENTIABLE or name in _PYTHON_OPERATORS

    @functools.wraps(function)
    def call(*args: Any, **keywords: Any) -> Any:
        if not allowed and any(_is_tracked(value, namespace) for value in (*args, *keywords.values())):
            raise NotImplementedError(
                f"{name} has no derivative rule; add one in xformer/autodiff/rules/, or use stop_gradient(x)"
            )
        lowered = {key: namespace.lower(value) for key, value in keywords.items()}
        return namespace.lift(function(*map(namespace.lower, args), **lowered))

    return call


def _is_tracked(value: Any, namespace: DiffNamespace) -> bool:
    if isinstance(value, tuple | list):
        return any(_is_tracked(item, namespace) for item in value)
    return type(value) is Tracer and value._namespace is namespace and value._index >= 0


# --- opening and closing -------------------------------------------------------------------------------------------


def new_trace(arrays: list[Any]) -> DiffNamespace:
    """Make the namespace of a new trace for what is computed from `arrays`.

    It computes in the innermost active trace of the same library, even when `arrays` are plain: the function to be
    differentiated may close over arrays of that trace.
    """
    base = array_namespace(*arrays)
    active = _ACTIVE.get()
    if active is not None and library(active) == library(base) and active.trace_level > trace_level(base):
        base = active
    return DiffNamespace(base)


@contextlib.contextmanager
def active(namespace: DiffNamespace) -> Iterator[None]:
    """Make `namespace` the innermost trace of this thread while a differentiated function runs."""
    token = _ACTIVE.set(namespace)
    try:
        yield
    finally:
        _ACTIVE.reset(token)
