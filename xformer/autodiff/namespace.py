"""Differentiation as a namespace: the functions of a library, each leaving a record on a tape.

One `DiffNamespace` is one trace. `array_namespace(tracer)` returns it, so code written against the standard runs
unchanged; its functions unwrap tracers, call the namespace below (a library, or the enclosing trace: that is how
higher orders work), and append a record. See README.md in this folder.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import Any

from xformer.autodiff.base_functions import function_below
from xformer.autodiff.record import recorder, sequence_recorder, unstack_recorder, without_rule
from xformer.autodiff.rule import RULES, SEQUENCE_RULES, Pull, Record
from xformer.autodiff.tracer import InnerArray, Tracer
from xformer.backends import array_namespace, backend_name, dtype_name, is_floating, trace_level

_ACTIVE: ContextVar[DiffNamespace | None] = ContextVar("active_trace", default=None)

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


class DiffNamespace:
    """An Array API namespace whose functions record how to pull cotangents back.

    base: the namespace it computes in; trace_level: 1 for a first derivative, 2 for a derivative of that, ...
    The value of its tracers belongs to `base`.
    """

    def __init__(self, base: Any) -> None:
        self.base = base
        self.trace_level = trace_level(base) + 1
        # array-api-compat takes namespaces of one name for one and the same: the level must be in the name.
        self.__name__ = f"{base.__name__}.diff{self.trace_level}"
        self.tape: list[Record] = []
        self.floating: set[Any] = set()  # the real floating dtypes met so far; asking their name each time is slow
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
        function = function_below(self.base, name)
        rule = RULES.get(_RULE_OF_OPERATOR.get(name, name))
        if rule is not None:
            return recorder(self, name, function, rule)
        if name in SEQUENCE_RULES:
            return sequence_recorder(self, name, function, SEQUENCE_RULES[name])
        if name == "unstack":
            return unstack_recorder(self, function)
        if not callable(function) or isinstance(function, type):
            return function  # dtypes, constants
        return without_rule(self, name, function)

    # --- lifting and lowering ------------------------------------------------------------------------------------

    def leaf(self, value: Any) -> Tracer:
        """Make an array a differentiable input of the trace; integers and booleans become constants."""
        return self.record(self.unwrap(value), None, (), None)

    def wrap(self, value: Any) -> Any:
        """Wrap arrays (also inside tuples and lists) as constants of the trace; leave everything else."""
        if type(value) is Tracer and value._namespace is self:
            return value
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*map(self.wrap, value))
        if isinstance(value, (tuple, list)):
            return type(value)(map(self.wrap, value))
        return Tracer(self.unwrap(value), self, -1) if _is_array(value) else value

    def unwrap(self, value: Any) -> Any:
        """What a value is below the trace: own arrays are unwrapped (also inside tuples and lists).

        Raises InnerArray for an array of an inner trace (see `innermost`), RuntimeError for one of an ended trace.
        """
        kind = type(value)
        if kind is Tracer:
            trace = value._namespace
            if trace.is_closed:
                trace.__getattr__("unwrap")
            if trace is self:
                return value._value
            if trace.trace_level > self.trace_level:
                raise InnerArray(trace)
        elif kind is tuple or kind is list:
            return kind([self.unwrap(item) for item in value])
        # A constant. An enclosing trace has its own arrays, and rules may count on seeing no others.
        return self.base.wrap(value) if self.trace_level > 1 else value

    def position(self, value: Any) -> int:
        """Where on the tape `value` was made; -1 for constants and everything that is not of this trace."""
        return value._index if type(value) is Tracer and value._namespace is self else -1

    def depends(self, value: Any) -> bool:
        """Tell whether a value, or something in it, depends on the inputs of the trace."""
        if type(value) is Tracer:
            return self.position(value) >= 0
        return isinstance(value, (tuple, list)) and any(map(self.depends, value))

    # --- recording -----------------------------------------------------------------------------------------------

    def record(self, output: Any, pull: Pull | None, parents: Sequence[int], saved: Any) -> Tracer:
        """Append a record for `output` and wrap it."""
        dtype = output.dtype
        if dtype not in self.floating:
            if dtype_name(dtype).startswith("complex"):
                raise NotImplementedError("derivatives of complex results are not supported; keep arrays real")
            if not is_floating(dtype):
                return Tracer(output, self, -1)
            self.floating.add(dtype)
        self.tape.append((pull, parents, saved, tuple(output.shape), dtype))
        return Tracer(output, self, len(self.tape) - 1)

    def record_several(
        self, outputs: Sequence[Any], pull: Pull, parents: Sequence[int], saved: Any
    ) -> tuple[Tracer, ...]:
        """Append a record for several outputs; `pull` gets the list of their cotangents, None where unused."""
        self.tape.append((pull, parents, saved, None, None))
        traced = []
        for output in outputs:
            self.tape.append((None, (), None, tuple(output.shape), output.dtype))
            traced.append(Tracer(output, self, len(self.tape) - 1 if is_floating(output.dtype) else -1))
        return tuple(traced)

    def close(self) -> None:
        """End the trace: nothing can be recorded any more, and arrays that escaped raise when they are used.

        The bound functions and the namespace refer to each other; without this, only the garbage collector would
        free what they hold. The tape stays, for the sweep.
        """
        kept = {name: self.__dict__[name] for name in ("base", "trace_level", "__name__", "tape")}
        self.__dict__.clear()
        self.__dict__.update(kept, is_closed=True)


def _is_array(value: Any) -> bool:
    # Scalar types such as numpy.float32 have both attributes, too.
    return hasattr(value, "dtype") and hasattr(value, "shape") and not isinstance(value, type)


# --- opening and closing -------------------------------------------------------------------------------------------


@contextlib.contextmanager
def tracing(base: Any) -> Iterator[DiffNamespace]:
    """Open a trace that computes in `base`: the innermost trace of this thread until the block ends."""
    namespace = DiffNamespace(base)
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
    """Make `namespace`, a trace or a plain library, the one that new traces in this thread compute in."""
    token = _ACTIVE.set(namespace if isinstance(namespace, DiffNamespace) else None)
    try:
        yield
    finally:
        _ACTIVE.reset(token)


def base_for(arrays: Sequence[Any]) -> Any:
    """The namespace that a new trace of `arrays` computes in.

    It is the innermost active trace of the same library, even when `arrays` are plain: the function to be
    differentiated may close over arrays of that trace.
    """
    base = array_namespace(*arrays)
    enclosing = _ACTIVE.get()
    if (
        enclosing is not None
        and backend_name(enclosing) == backend_name(base)
        and enclosing.trace_level > trace_level(base)
    ):
        return enclosing
    return base
