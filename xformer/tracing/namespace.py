"""Differentiation as a namespace: the functions of a library, each of which appends a record to a tape.

One `GradTrace` is one trace. `array_namespace(tracer)` returns it, so code written against the standard runs
unchanged; its functions unwrap tracers, call the namespace below (a library, or the enclosing trace: that is how
higher orders work), and append a record. See README.md in this folder.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from types import ModuleType
from typing import Any

from xformer.backends import array_namespace, backend_name, call_on_host, dtype_name, is_floating, trace_level
from xformer.errors import DifferentiationError
from xformer.tracing.graph import ACTIVE_GRAPH
from xformer.tracing.record import base_function, bind_rule, bind_sequence, bind_unstack, bind_without_rule
from xformer.tracing.rule import RULES, SEQUENCE_RULES, Pull, Record
from xformer.tracing.tracer import CALLER, OTHER_NAMES, InnerArray, Tracer

_ACTIVE: ContextVar[GradTrace | None] = ContextVar("active_trace", default=None)

# The function whose derivative each operator shares.
_RULE_OF_OPERATOR = {
    "operator_abs": "abs",
    "operator_add": "add",
    "operator_matmul": "matmul",
    "operator_mod": "remainder",
    "operator_mul": "multiply",
    "operator_neg": "negative",
    "operator_pos": "positive",
    "operator_pow": "pow",
    "operator_sub": "subtract",
    "operator_truediv": "divide",
}


class GradTrace:
    """An Array API namespace whose functions record how to pull cotangents back.

    Attributes:
        base: Namespace that it computes in; the values of its tracers are arrays of it.
        trace_level: 1 for a first derivative, 2 for a derivative of that, and so on.
    """

    is_trace = True

    def __init__(self, base: Any) -> None:
        self.base = base
        self.trace_level = trace_level(base) + 1
        # array-api-compat identifies namespaces by name, so the level must be part of it.
        self.__name__ = f"{base.__name__}.diff{self.trace_level}"
        self.tape: list[Record] = []
        self.floating: set[Any] = set()  # real floating dtypes seen so far; looking up their names each time is slow
        self.is_closed = False

    def __repr__(self) -> str:
        return f"<differentiating namespace {self.__name__}>"

    def __getattr__(self, name: str) -> Any:
        """Bind a function at its first use; a trace uses only some twenty of the two hundred."""
        if name.startswith("__") and name != "__array_namespace_info__":
            return getattr(self.base, name)
        if self.is_closed:
            raise DifferentiationError(
                f"a traced array was used (by {name!r}) after its value_and_grad/vjp call had ended; "
                "return it from the function instead of storing it elsewhere"
            )
        try:
            value = self._bind(name)
        except AttributeError:
            if name not in OTHER_NAMES:
                raise
            raise AttributeError(
                f"the namespace of {backend_name(self.base)} has no function {name!r}; {OTHER_NAMES[name]}"
            ) from None
        setattr(self, name, value)
        return value

    def _bind(self, name: str) -> Any:
        function = base_function(self.base, name)
        rule = RULES.get(_RULE_OF_OPERATOR.get(name, name))
        if rule is not None:
            return bind_rule(self, name, function, rule)
        if name in SEQUENCE_RULES:
            return bind_sequence(self, name, function, SEQUENCE_RULES[name])
        if name == "unstack":
            return bind_unstack(self, function)
        if not callable(function) or isinstance(function, type):
            return function  # dtypes, constants
        return bind_without_rule(self, name, function)

    # --- wrapping and unwrapping ------------------------------------------------------------------------------------

    def leaves(self, values: Sequence[Any]) -> list[Tracer]:
        """Return arrays as differentiable inputs of the trace; integers and booleans become constants."""
        leaves = [self.record(value, None, (), None) for value in self.unwrap(list(values))]
        for leaf in leaves:
            leaf._family = CALLER
        return leaves

    def wrap(self, value: Any) -> Any:
        """Wrap arrays, also inside tuples and lists, as constants of the trace; return everything else as it is."""
        if type(value) is Tracer and value._namespace is self:
            return value
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*map(self.wrap, value))
        if isinstance(value, (tuple, list)):
            return type(value)(map(self.wrap, value))
        return Tracer(self.unwrap(value), self, -1) if _is_array(value) else value

    def unwrap(self, value: Any) -> Any:
        """Return a value for the base namespace: arrays of the trace are unwrapped, also inside tuples and lists.

        Raises:
            InnerArray: For an array of an inner trace (see `innermost`).
            RuntimeError: For an array of an ended trace.
        """
        cls = type(value)
        if cls is Tracer:
            trace = value._namespace
            if trace.is_closed:
                trace.__getattr__("unwrap")
            if trace is self:
                return value._value
            if trace.trace_level > self.trace_level:
                raise InnerArray(trace)
        elif cls is tuple or cls is list:
            return cls([self.unwrap(item) for item in value])
        # A constant. An enclosing trace has its own arrays, and its rules expect no others.
        return self.base.wrap(value) if self.trace_level > 1 else value

    def position(self, value: Any) -> int:
        """Return the tape position of `value`; -1 for constants and values that are not of this trace."""
        return value._index if type(value) is Tracer and value._namespace is self else -1

    def depends(self, value: Any) -> bool:
        """Return whether a value, or an item of it, depends on the inputs of the trace."""
        if type(value) is Tracer:
            return self.position(value) >= 0
        return isinstance(value, (tuple, list)) and any(map(self.depends, value))

    def stacked(self, value: Any) -> Any:
        """Return a nested list or tuple with an item that depends on the inputs as one array, anything else as it is.

        The items are arrays and numbers, as for `asarray`.
        """
        if not isinstance(value, (tuple, list)) or not self.depends(value):
            return value
        items = map(self.stacked, value)
        return self.stack([item if _is_array(item) else self.asarray(item) for item in items])

    # --- values and items of arrays -----------------------------------------------------------------------------------

    def read(self, x: Tracer, use: str) -> Any:
        """Return the value of an array that is read by `bool(x)` and the like.

        A branch on a value is locally constant. Any other use of a number that depends on the inputs raises.
        """
        if use == "np.asarray":
            raise DifferentiationError(
                "a traced array was passed to a function of another library, which would lose its gradient; "
                "use the functions of array_namespace(x), or return values with has_aux=True"
            )
        if use != "bool" and x._index >= 0:
            raise DifferentiationError(
                f"{use}(x) of a traced array, or its assignment to an element of a plain array, would lose its "
                f"gradient; use functions of array_namespace(x), such as xp.stack, or {use}(xformer.stop_gradient(x))"
            )
        return x._value

    def write_item(self, x: Tracer, key: Any, value: Any) -> None:
        """Replace the array of a tracer by a copy with the change; layers do not use this."""
        family = x._family
        is_view = family is not None and type(value) is Tracer and value is not x and value._family is family
        others = (each() for each in family or ())
        if family is CALLER or any(not any(y is each for each in (None, x, value)) for y in others):
            raise DifferentiationError(
                "x[...] = value in a differentiated function, where x shares memory with an argument or with a view "
                "of an array; write into a copy: x = xp.asarray(x, copy=True)"
            )
        updated = self.setitem(x, value, key)
        x._value, x._index = updated._value, updated._index
        if is_view:  # as in x[0] = x[1]; it lacks the new values
            value._namespace = _Overwritten()

    def call_on_host(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function that reads arrays without a derivative."""
        return call_on_host(function, *map(self.unwrap, args))

    # --- recording -----------------------------------------------------------------------------------------------

    def record(self, output: Any, pull: Pull | None, parents: Sequence[int], residuals: Any) -> Tracer:
        """Append a record for `output` and wrap it."""
        dtype = output.dtype
        if dtype not in self.floating:
            if dtype_name(dtype).startswith("complex"):
                raise DifferentiationError("derivatives of complex results are not supported; keep arrays real")
            if not is_floating(dtype):
                return Tracer(output, self, -1)
            self.floating.add(dtype)
        self.tape.append((pull, parents, residuals, tuple(output.shape), dtype))
        return Tracer(output, self, len(self.tape) - 1)

    def record_outputs(
        self, outputs: Sequence[Any], pull: Pull, parents: Sequence[int], residuals: Any
    ) -> tuple[Tracer, ...]:
        """Append a record with several outputs; `pull` gets the list of their cotangents, None for unused outputs."""
        self.tape.append((pull, parents, residuals, None, None))
        traced = []
        for output in outputs:
            self.tape.append((None, (), None, tuple(output.shape), output.dtype))
            traced.append(Tracer(output, self, len(self.tape) - 1 if is_floating(output.dtype) else -1))
        return tuple(traced)

    def close(self) -> None:
        """End the trace: later uses of its arrays raise.

        The bound functions and the namespace refer to each other; otherwise only the garbage collector would free their
        memory. The tape remains for the backward pass.
        """
        attributes = {name: self.__dict__[name] for name in ("base", "trace_level", "__name__", "tape")}
        self.__dict__.clear()
        self.__dict__.update(attributes, is_closed=True)


class _Overwritten:
    """The namespace of a view of an array that was written."""

    is_closed = True

    def __getattr__(self, name: str) -> Any:
        raise DifferentiationError(
            f"a view was used (by {name!r}) after it was written into its array; copy it: xp.asarray(view, copy=True)"
        )


def _is_array(value: Any) -> bool:
    # Scalar types such as numpy.float32 also have both attributes.
    return hasattr(value, "dtype") and hasattr(value, "shape") and not isinstance(value, type)


# --- opening and closing -------------------------------------------------------------------------------------------


@contextlib.contextmanager
def tracing(base: Any) -> Iterator[GradTrace]:
    """Open a trace that computes in `base` and is the innermost trace of this thread until the block ends."""
    namespace = GradTrace(base)
    try:
        with active(namespace):
            yield namespace
    except BaseException:
        namespace.tape.clear()
        raise
    finally:
        namespace.close()


@contextlib.contextmanager
def active(namespace: Any) -> Iterator[None]:
    """Make `namespace`, a trace or a plain library, the base of new traces in this thread."""
    token = _ACTIVE.set(namespace if isinstance(namespace, GradTrace) else None)
    try:
        yield
    finally:
        _ACTIVE.reset(token)


def innermost_trace() -> Any:
    """Return the innermost trace of a derivative in this thread, or None."""
    return _ACTIVE.get()


def base_for(arrays: Sequence[Any]) -> Any:
    """Return the namespace in which a new trace of `arrays` computes.

    It is the innermost active trace of the same library, even if `arrays` are plain, since the function to
    differentiate may close over arrays of that trace.
    """
    base = array_namespace(*arrays)
    for enclosing in (_ACTIVE.get(), ACTIVE_GRAPH.get()):
        if enclosing is not None and backend_name(enclosing) == backend_name(base):
            if trace_level(base) < enclosing.trace_level or type(base) is ModuleType:
                return enclosing
            break
    return base
