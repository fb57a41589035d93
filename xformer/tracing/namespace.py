"""Differentiation as a namespace: the functions of a library, each of which appends a record to a tape.

One `GradTrace` is one trace. `array_namespace(tracer)` returns it, so code written against the standard runs
unchanged; its functions unwrap tracers, call the namespace below (a library, or the enclosing trace: that is how
higher orders work), and append a record. See README.md in this folder.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import linecache
import re
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import numpy as np

from xformer.backends import array_namespace, is_inexact
from xformer.backends.arrays import check_class
from xformer.backends.library import NOT_PLAIN, as_arrays
from xformer.errors import BackendError, DifferentiationError, XformerError
from xformer.threads import setting
from xformer.tracing import record
from xformer.tracing.graph import ACTIVE_GRAPH
from xformer.tracing.rule import OUTPUT_RULES, RULE_OF_OPERATOR, RULES, SEQUENCE_RULES, Pull, Record
from xformer.tracing.tracer import CREATE, PLAIN, WITHOUT_ARRAYS, WRITE, WRITES_OUTER, InnerArray, Tracer, value_of
from xformer.tree import is_array, items_of, map_items, rebuild_sequence

_ACTIVE: ContextVar[GradTrace | None] = ContextVar("active_trace", default=None)

WRITTEN_LATER = (
    "an array that the derivative needs was written after it was used; write into a copy of it: "
    "xp.asarray(x, copy=True)"
)


class GradTrace(record.Trace):
    """An Array API namespace whose functions record how to pull cotangents back.

    Attributes:
        trace_level: 1 for a first derivative, 2 for a derivative of that, and so on.
    """

    is_writable = False  # a derivative may need the old values

    def __init__(self, base: Any) -> None:
        self.base, self.library = base, base.library
        self.trace_level = base.trace_level + 1
        # array-api-compat identifies namespaces by name, so the level must be part of it.
        self.__name__ = f"{base.__name__}.diff{self.trace_level}"
        self.tape: list[Record] = []
        self.floating: set[Any] = set()  # floating dtypes seen so far; looking up their names each time is slow
        self.is_closed = False
        self._constants: dict[int, tuple[Any, Any, Any]] = {}  # by id, what became constants, those, and their ids
        self._kept: list[Callable[[], bool]] = []  # functions that end the keeping of an array; see Library.keep

    def __repr__(self) -> str:
        return f"<differentiating namespace {self.__name__}>"

    def ended(self, name: str) -> DifferentiationError:
        """Return the error for a use of an array after the end."""
        return DifferentiationError(
            f"a traced array was used (by {name!r}) after its value_and_grad/vjp/jvp/vmap call had ended; "
            "return it from the function instead of storing it elsewhere"
        )

    def bind(self, name: str, function: Any) -> Any:
        """Return the traced version of a function of the base namespace."""
        rule = RULES.get(RULE_OF_OPERATOR.get(name, name))
        if rule is not None:
            call = record.bind_rule(self, name, function, rule)
        elif name in SEQUENCE_RULES:
            call = record.bind_sequence(self, name, function, SEQUENCE_RULES[name])
        elif name in OUTPUT_RULES:
            call = record.bind_outputs(self, name, function, OUTPUT_RULES[name])
        else:
            call = record.bind_without_rule(self, name, function)
        return functools.wraps(function)(call) if hasattr(function, "__name__") else call

    # --- wrapping and unwrapping ------------------------------------------------------------------------------------

    def leaves(self, values: Sequence[Any]) -> list[Tracer]:
        """Return arrays as differentiable inputs of the trace; integers and booleans become constants."""
        return [self.record(value, None, (), None) for value in self.unwrap(list(values))]

    def wrap(self, value: Any) -> Any:
        """Wrap arrays, also inside tuples and lists, as constants of the trace; return everything else as it is."""
        if type(value) is Tracer and value._namespace is self:
            return value
        if isinstance(value, (tuple, list)):
            return rebuild_sequence(value, map(self.wrap, value))
        return Tracer(self.unwrap(value), self, -1) if is_array(value) else value

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
            if trace.trace_level == self.trace_level:
                raise DifferentiationError("remat(f) closes over a traced array; pass it to f as an argument")
        elif cls is tuple or cls is list:
            return cls(value if WITHOUT_ARRAYS.issuperset(map(type, value)) else [self.unwrap(item) for item in value])
        # A constant. An enclosing trace has its own arrays, and its rules expect no others.
        return self.base.plain(value) if self.trace_level > 1 else value

    def plain(self, value: Any) -> Any:
        """Return a plain array, or one of an outer trace, as a constant of this trace with the same memory."""
        if not is_array(value) or (type(value) is Tracer and value._namespace is self):
            return value
        constant = Tracer(self.unwrap(value), self, -1)
        constant._origin = PLAIN
        return constant

    def constants(self, value: Any) -> Any:
        """Return the arrays of a tree as constants, so that other libraries find one namespace for all arguments.

        Modules, whose operations take plain arrays, and arrays of other libraries or of subclasses stay as they are.
        """
        if id(value) not in self._constants:
            new = self._constant(value)
            self._constants[id(value)] = value, new, _ids(new)
        return self._constants[id(value)][1]

    def _constant(self, value: Any) -> Any:
        if is_array(value):
            with contextlib.suppress(BackendError):  # of classes that no trace takes
                return self.plain(value) if array_namespace(value).name == self.library.name else value
        is_tree = type(value) in (dict, list, tuple) or hasattr(value, "_fields")
        return map_items(self.constants, value) if is_tree and any(map(is_array, items_of(value))) else value

    def end_constants(self) -> None:
        """Repeat in the lists and dicts of the caller what the function has changed in those that it got."""
        given = {id(new): value for value, new, _ in self._constants.values()}

        def given_back(x: Any) -> Any:
            is_own = type(x) is Tracer and x._namespace is self
            return given.get(id(x), x._value if is_own else x)

        for value, new, ids in self._constants.values():
            if _ids(new) != ids:
                items = map_items(given_back, new)
                value.clear()
                (value.update if type(value) is dict else value.extend)(items)

    def keep(self, value: Any) -> Any:
        """Unwrap a value that the backward pass needs, whatever is written into plain and outer arrays until then."""
        cls = type(value)
        if cls is tuple or cls is list:
            return cls(value if WITHOUT_ARRAYS.issuperset(map(type, value)) else [self.keep(item) for item in value])
        is_own = cls is Tracer and value._namespace is self
        if (is_own and value._origin is not PLAIN) or not is_array(value) or isinstance(value, np.generic):
            return self.unwrap(value)
        return self.keep_outer(self.unwrap(value) if cls is Tracer else value)

    def keep_outer(self, value: Any) -> Any:
        """Keep a plain array or one of an outer trace; see `keep`."""
        check_class(value)
        xp = self.base
        if xp.is_trace:
            kept, end = xp.keep_for_inner(value)
        else:
            kept, end = array_namespace(value).library.keep(value)
        if end is not None:
            self._kept.append(end)
        return kept

    def keep_for_inner(self, value: Any) -> tuple[Any, None]:
        """Return an array of this trace, for an inner one, that no write to `value` changes."""
        if type(value) is Tracer and value._namespace is self and value._origin is not PLAIN:
            return Tracer(value._value, self, value._index), None
        return Tracer(self.keep(value), self, self.position(value)), None

    def end_keeping(self) -> bool:
        """Let kept arrays be written again; return whether none of them was written meanwhile."""
        ends, self._kept = self._kept, []
        kept = [end() for end in reversed(ends)]
        return all(kept)

    def __del__(self) -> None:
        if "_kept" in self.__dict__:
            self.end_keeping()

    def position(self, value: Any) -> int:
        """Return the tape position of `value`; -1 for constants and values that are not of this trace."""
        return value._index if type(value) is Tracer and value._namespace is self else -1

    def depends(self, value: Any) -> bool:
        """Return whether a value, or an item of it, depends on the inputs of the trace."""
        if type(value) is Tracer:
            return value._index >= 0 and value._namespace is self
        if not isinstance(value, (tuple, list)) or WITHOUT_ARRAYS.issuperset(map(type, value)):
            return False
        return any(map(self.depends, value))

    def stacked(self, value: Any) -> Any:
        """Return a nested list or tuple with an item that depends on the inputs as one array, anything else as it is.

        The items are arrays and numbers, as for `asarray`.
        """
        if not isinstance(value, (tuple, list)) or not self.depends(value):
            return value
        items = map(self.stacked, value)
        return self.stack([item if is_array(item) else self.asarray(item) for item in items])

    # --- values and items of arrays -----------------------------------------------------------------------------------

    def read(self, x: Tracer, use: str) -> Any:
        """Return the value of an array that is read by `bool(x)` and the like.

        A branch on a value is locally constant. Any other use of a number that depends on the inputs raises.
        """
        if use == WRITE:
            raise DifferentiationError(f"{WRITE} and would lose its gradient; {CREATE}")
        if use == "np.asarray" and x._index >= 0:
            hint, caller = "x for np.asarray(x), np.stack([x[0], x[1]]) for an array of a list", _caller()
            if " of scipy." in caller:
                hint = "SciPy with SCIPY_ARRAY_API=1 for the functions in docs/how-to/differentiate.md, else a formula"
            elif " of pandas." in caller:
                hint = "x.to_numpy() for a column x of pandas"
            raise DifferentiationError(
                f"a traced array was passed to a function of another library ({caller}), which would lose its "
                f"gradient; use {hint}, functions of array_namespace(x), or has_aux=True for results"
            )
        is_number = use in ("bool", "float", "int", "complex", "operator.index")
        if use != "bool" and x._index >= 0:
            if not is_number:
                remedy = "compose it of others, or see 'Derivatives of your own' in docs/how-to/differentiate.md"
                raise DifferentiationError(f"{use} of a traced array has no derivative rule; {remedy}")
            raise DifferentiationError(
                f"{use}(x) of a traced array, as in math.sin(x), or in y[i] = x with a plain array y, would lose its "
                f"gradient; use np.sin(x), {CREATE}, or use {use}(xformer.stop_gradient(x))"
            )
        return x._value if is_number else self.plain_value(x)

    def plain_value(self, x: Tracer) -> Any:
        """Return the plain array of a constant, into which others may write from now on, as into that of `plain`.

        The tape may have used its values, so they get other memory, as do its views; what is traced does not.
        """
        owner = next(y for y in reversed(self._sources_of(x)) if y._index < 0)
        if owner._origin is not PLAIN and self.share_memory(owner, owner):  # else nothing writes into it
            owner._origin, views = None, list(self._views_of(owner))
            self._replace(owner, views, Tracer(self.base.asarray(owner._value, copy=True), self, -1))
            for y in (owner, *views):
                y._origin = PLAIN
        return x._value

    def write_item(self, x: Tracer, key: Any, value: Any) -> None:
        """Assign to elements: x[key] = value."""
        self._write(x, self.setitem(x, value, key))

    def update(self, x: Tracer, name: str, other: Any) -> Tracer:
        """Compute `x op= other` for the operator with this name, such as "add"; return x."""
        self._write(x, getattr(self, f"inplace_{name}")(x, other))
        return x

    def _write(self, x: Tracer, new: Any) -> None:
        """Give an array new values, and the new values of its elements to all arrays that share its memory.

        Arrays are values on the tape, so each of these arrays gets another one: first those that `x` is a view of, up
        to the one that owns the memory, and then all views of it.
        """
        if new._namespace is not self:
            raise DifferentiationError(WRITES_OUTER)
        if not getattr(getattr(value_of(x), "flags", None), "writeable", True):
            problem = "an array was written that is read-only, or that vjp needs unchanged until its pullback"
            raise DifferentiationError(f"{problem}; write into a copy: xp.asarray(x, copy=True)")
        chain = self._sources_of(x)
        owner = chain[-1]
        if owner._origin is PLAIN:
            is_in_program = self.base.is_trace and not isinstance(self.base, GradTrace)
            if new._index >= 0 or (is_in_program and type(x._value) is not Tracer):  # an array that is not its argument
                problem = "traced values were written into the memory of a plain array"
                raise DifferentiationError(f"{problem}; write into a copy: xp.asarray(x, copy=True)")
            x._value[...] = new._value
            return
        views = list(self._views_of(owner))
        if any(view._origin[1] == "remat" for view in views):
            raise DifferentiationError("an array that remat(f) returned as it was is written; let f return a copy")
        for view, parent in itertools.pairwise(chain):
            new = self._with_view(parent, view, new)
        self._replace(owner, views, new)

    def _replace(self, owner: Tracer, views: list[Tracer], new: Any) -> None:
        """Give an array that owns memory, and its views, new values."""
        owner._value, owner._index = new._value, new._index
        for view in views:
            parent, name, args, keywords = view._origin
            is_stopped = name == "stop_gradient"
            new = parent.stopped() if is_stopped else getattr(self, name)(parent, *args, **keywords)
            view._value, view._index = new._value, new._index

    def _sources_of(self, x: Tracer) -> list[Tracer]:
        """Return an array and those that it is a view of, up to the one that owns the memory."""
        chain = [x]
        while type(chain[-1]._origin) is tuple and self.share_memory(chain[-1], chain[-1]._origin[0]):
            chain.append(chain[-1]._origin[0])
        return chain

    def _views_of(self, x: Tracer) -> Iterator[Tracer]:
        """Yield the arrays that share the memory of `x`, parents before their views."""
        found = [view for view in (reference() for reference in x._views or ()) if view is not None]
        found = [view for view in found if self.share_memory(view, x)]
        x._views = [weakref.ref(view) for view in found]
        for view in found:
            yield view
            yield from self._views_of(view)

    def share_memory(self, x: Any, y: Any) -> bool:
        """Return whether a write into `x` changes `y`, for arrays of this trace or of outer ones."""
        return self.library.share_memory(value_of(x), value_of(y))

    def _with_view(self, parent: Tracer, view: Tracer, new: Any) -> Any:
        """Return the new values of `parent` if those of its view are `new`."""
        name, args, keywords = view._origin[1:]
        if name == "getitem":
            return self.setitem(parent, new, *args)
        name = RULE_OF_OPERATOR.get(name, name)
        if name not in RULES or view.size != parent.size or view.dtype != parent.dtype:
            raise DifferentiationError(f"the result of {name} was written; write into a copy: xp.asarray(x, copy=True)")
        ((select, pull),) = RULES[name].steps
        (values,) = pull(self, new, (select((parent, view)) + args, keywords))
        return self.reshape(values, tuple(parent.shape))

    def call_on_host(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function that reads arrays without a derivative."""
        return self.base.call_on_host(function, *map(self.unwrap, args))

    def check_range(self, x: Any, size: int, check: Callable[[Any], None]) -> None:
        """Let `check(x)` raise an error unless all values are in [0, size), where reading them is cheap."""
        self.base.check_range(self.unwrap(x), size, check)

    def is_host_accessible(self, x: Any) -> bool:
        """Return False: reading values may lose a derivative."""
        return False

    # --- operations ---------------------------------------------------------------------------------------------------

    def apply(self, operation: Any, arrays: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Compute an operation of `xformer.ops` below the trace, and append one record for the whole operation."""
        values: list[Any] = []
        parents: list[int] = []
        for array in arrays:
            is_own = type(array) is Tracer and array._namespace is self and not self.is_closed
            values.append(array._value if is_own else None if array is None else self.unwrap(array))
            parents.append(array._index if is_own else -1)
        if max(parents) < 0:
            return self.wrap(operation(*values, **options))
        needs = []
        for index, parent in enumerate(parents):
            needs.append(parent >= 0)
            if parent < 0 and values[index] is not None:
                values[index] = self.keep(arrays[index])
            if isinstance(values[index], NOT_PLAIN):
                values[index] = np.asarray(values[index])
        dtype = operation.signature.check(operation.name, values)
        kernel = operation.select(self.base, values, options, dtype, save=True)
        if kernel.vjp is None:  # raise before computing, since such operations may work in place
            problem = f"{operation.name} has no derivative"
            raise DifferentiationError(f"{problem}; call it outside the differentiated function")
        output, residuals = kernel.forward(*values, save=True, **options)
        record = self.record_outputs if isinstance(output, tuple) else self.record
        return record(output, _pull, parents, (kernel.vjp, residuals, tuple(needs), options))

    def apply_definition(self, operation: Any, arrays: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Compute an operation of `xformer.ops` by its definition, of whose functions the trace keeps track."""
        if max(map(self.position, arrays)) < 0:
            return self.wrap(operation(*map(self.unwrap, arrays), **options))
        operation.check(*arrays)
        traced = tuple(map(self.wrap, arrays))
        return operation.portable(self, traced).forward(*traced, save=False, **options)[0]

    def select(self, operation: Any, arrays: Any, options: dict[str, Any], dtype: str, *, save: bool) -> Any:
        """Return the definition of an operation, which can be differentiated again, for arrays of this trace."""
        return operation.portable(self, arrays)

    # --- recording -----------------------------------------------------------------------------------------------

    def record(self, output: Any, pull: Pull | None, parents: Sequence[int], residuals: Any) -> Tracer:
        """Append a record for `output` and wrap it."""
        dtype = output.dtype
        if dtype not in self.floating:
            if not is_inexact(dtype):
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
            traced.append(Tracer(output, self, len(self.tape) - 1 if is_inexact(output.dtype) else -1))
        return tuple(traced)

    def close(self) -> None:
        """End the trace: later uses of its arrays raise.

        The bound functions and the namespace refer to each other; otherwise only the garbage collector would free their
        memory. The tape remains for the backward pass.
        """
        attributes = {
            name: self.__dict__[name] for name in ("base", "library", "trace_level", "__name__", "tape", "_kept")
        }
        self.__dict__.clear()
        self.__dict__.update(attributes, is_closed=True)


def _ids(value: Any) -> Any:
    """Return the identities of the keys and items of a list or dict; None for anything else."""
    return [*map(id, value), *map(id, getattr(value, "values", tuple)())] if type(value) in (dict, list) else None


def _caller() -> str:
    """Return the innermost call that is not of xformer, NumPy or an adapter of the standard, and its function."""
    frame: Any = sys._getframe(1)
    while frame.f_back and re.match(r"xformer\.|numpy|.*array_api_compat", frame.f_globals.get("__name__", "<string>")):
        frame = frame.f_back
    line, last, start, end = [*frame.f_code.co_positions()][frame.f_lasti // 2]
    call = linecache.getline(frame.f_code.co_filename, line)[start : end if line == last else None].strip()
    return f"{call or 'a call'} in {frame.f_code.co_name} of {frame.f_globals.get('__name__', '<string>')}"


def _pull(xp: Any, g: Any, saved: Any) -> Any:
    """Pull the cotangent of an operation back, or the list of those of its outputs."""
    vjp, residuals, needs, options = saved
    if isinstance(g, list):
        g = list(as_arrays(g))
    elif isinstance(g, np.generic):
        g = np.asarray(g)
    return vjp(g, residuals, needs, **options)


# --- opening and closing -------------------------------------------------------------------------------------------


@contextlib.contextmanager
def tracing(base: Any, new: Callable[[Any], Any] | None = None) -> Iterator[Any]:
    """Open a trace that computes in `base` and is the innermost trace of this thread until the block ends."""
    namespace = (new or GradTrace)(base)
    record.register()
    try:
        with setting(_ACTIVE, namespace):
            yield namespace
    except BaseException as error:
        namespace.tape.clear()
        is_kept = bool(namespace._kept)
        namespace.end_keeping()
        if is_kept and isinstance(error, ValueError) and "read-only" in str(error):  # NumPy's, for a kept array
            raise DifferentiationError(WRITTEN_LATER) from error
        if type(error) is ValueError and isinstance(error.__cause__, XformerError):  # NumPy's, for plain[i] = traced
            raise error.__cause__.with_traceback(error.__traceback__) from None
        raise
    finally:
        namespace.end_constants()
        namespace.close()


def innermost_trace() -> Any:
    """Return the innermost trace of a derivative in this thread, or None."""
    return _ACTIVE.get()


def base_for(arrays: Sequence[Any]) -> Any:
    """Return the namespace in which a new trace of `arrays` computes.

    It is the innermost active trace of the same library, even if `arrays` are plain, since the function to
    differentiate may close over arrays of that trace.
    """
    base: Any = array_namespace(*arrays)
    for enclosing in (_ACTIVE.get(), ACTIVE_GRAPH.get()):
        if enclosing is not None and enclosing.name == base.name:
            if base.trace_level < enclosing.trace_level or not base.is_trace:
                return enclosing
            break
    return base
