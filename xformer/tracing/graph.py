"""Programs as data: a trace of NumPy that records what a function computes, and in which arrays.

`GraphTrace` is a namespace, as the trace of a derivative is one. Its functions compute with NumPy and append a call
to the graph, which repeats the computation in the same memory. Views need no call. Kernels of operations run as they
are: calls of the native library record themselves, and any other kernel is one call.

Values of traced arrays may differ in the next run, so reading one (`float(x)`, `bool(x)`, `np.asarray(x)`) raises
JitError. Plain arrays that the function does not get as arguments are constants.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import weakref
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from xformer import native
from xformer.backends import Library, resolve
from xformer.backends.arrays import check_class
from xformer.errors import DifferentiationError, JitError
from xformer.native.functions import LOWERINGS
from xformer.threads import run_serially, setting
from xformer.tracing.record import Trace, register
from xformer.tracing.tracer import CREATE, NUMBER, PLAIN, WRITE, WRITES_OUTER, Tracer
from xformer.tree import items_of, map_items, rebuild_sequence

ACTIVE_GRAPH: ContextVar[GraphTrace | None] = ContextVar("active_graph", default=None)

# Functions whose arrays all have shapes that arguments give: a traced array among these would be read on the host.
_CREATION = {"arange", "empty", "eye", "linspace", "ones", "zeros"}
# Functions whose lists and tuples contain arrays.
_TAKES_LISTS = {"asarray", "broadcast_arrays", "concat", "getitem", "meshgrid", "result_type", "setitem", "stack"}
_VALUE_DEPENDENT = {"argwhere", "nonzero", "unique_all", "unique_counts", "unique_inverse", "unique_values"}


@dataclass(eq=False)
class Place:
    """Position of an array that calls write; kept instead of the array, so that its memory is free once nobody uses it.

    Attributes:
        root: Reference to the array that owns the memory.
        nbytes: Size of that array.
        offset: Distance from its first byte.
        shape: Shape of the array.
        dtype: Dtype of the array.
        strides: Strides of the array.
    """

    root: weakref.ref[Any]
    nbytes: int
    offset: int
    shape: tuple[int, ...]
    dtype: Any
    strides: tuple[int, ...]

    @classmethod
    def of(cls, array: Any, root: weakref.ref[Any]) -> Place:
        """Return the place of an array."""
        offset = array.ctypes.data - root().ctypes.data  # type: ignore[union-attr]
        return cls(root, root().nbytes, offset, array.shape, array.dtype, array.strides)  # type: ignore[union-attr]

    def array_in(self, memory: Any, start: int = 0) -> Any:
        """Return the array in other memory, at this distance from `start`."""
        return np.ndarray(self.shape, self.dtype, memory, start + self.offset, self.strides)


class Call(NamedTuple):
    """One call of a graph; it writes into some of its arguments.

    Attributes:
        function: A function of Python, or the name of a native operation.
        args: Its arguments; of a native operation the tuple of arrays, and then numbers.
        outputs: The arrays that it writes. They, and what later calls read of them, are each a `Place`.
        is_check: Whether it is made only after a native operation has met an index out of range, to raise the error.
    """

    function: Callable[..., Any] | str
    args: tuple[Any, ...]
    outputs: tuple[Any, ...]
    is_check: bool = False


WRITES_CONSTANT = (
    "the function writes into a plain array after it was used; pass it as an argument, or write into a copy"
)


class Constant(NamedTuple):
    """A plain array that a function uses.

    Attributes:
        array: The array.
        copies: Copies of it, one more each time that it had other values than before; of a large one the array itself.
    """

    array: Any
    copies: list[Any]

    def is_written(self) -> bool:
        """Return whether the function has written into the array after its first use."""
        return len(self.copies) > 1 or not self.has_values_of_last_copy()

    def has_values_of_last_copy(self) -> bool:
        """Return whether the array has the values of the last copy."""
        copy = self.copies[-1]
        return copy is self.array or bool(copy.tobytes() == self.array.tobytes())


class GraphTrace(Trace):
    """The trace of one function; see the top of this module.

    Attributes:
        calls: The calls so far, in order.
        constants: The plain arrays that the function uses, by id.
        are_kept: Whether no constant was written that was too large for a copy; known when the function has ended.
    """

    is_writable = True
    trace_level = 0  # it computes no derivatives
    apply = Library.apply  # by the kernels that `select` returns

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.base = self.library = resolve("numpy")
        self.__name__ = self.base.__name__
        self.is_closed = False
        self.constants: dict[int, Constant] = {}
        self.are_kept = True
        self._copies: set[int] = set()  # ids of the copies of constants
        self._ends: list[Callable[[], bool]] = []
        self._waiting: list[tuple[Callable[[Any], Any], Tracer]] = []
        self._written: dict[int, weakref.ref[Any]] = {}  # arrays that own memory which calls write, by id

    def __repr__(self) -> str:
        return "<tracing namespace of numpy>"

    @contextlib.contextmanager
    def record(self) -> Iterator[None]:
        """Record inside the block, in this thread; afterwards the arrays of the trace cannot be used."""
        register()
        try:
            with (
                setting(ACTIVE_GRAPH, self),
                run_serially(),
                native.record(lambda name, x, rest, y: self._append(name, (x, *rest), y)),
            ):
                yield
        except ValueError as error:
            if self._ends and "read-only" in str(error):  # NumPy's, for a constant
                raise JitError(WRITES_CONSTANT) from error
            raise
        finally:
            self.is_closed = True
            kept = [end() for end in reversed(self._ends)]
            self.are_kept = all(kept)
            self._ends.clear()

    def take_calls(self) -> list[Call]:
        """Return the calls and forget all arrays, which cycles of bound functions would keep in memory."""
        calls, self.calls, self.constants = self.calls, [], {}
        return calls

    # --- arrays ---------------------------------------------------------------------------------------------------

    def wrap(self, value: Any, *, is_number: bool = False) -> Any:
        """Return plain arrays, also in tuples and lists, as arrays of this trace; everything else as it is.

        Args:
            value: Any value.
            is_number: Whether an array stands for an immutable number, as those of `numpy.generic` do.
        """
        if isinstance(value, np.ndarray | np.generic):
            if value.dtype.hasobject:
                raise JitError("the function computes arrays of dtype object; convert them outside")
            check_class(value)
            traced = Tracer(np.asarray(value), self, 0)
            if is_number or isinstance(value, np.generic):
                traced._origin = NUMBER
            return traced
        return map_items(self.wrap, value)

    def unwrap(self, value: Any) -> Any:
        """Return plain arrays instead of arrays of this trace, also in tuples, lists and dicts."""
        if isinstance(value, np.ndarray):
            return self._constant(value)
        return self.unwrap_traced(value, self.unwrap)

    def unwrap_traced(self, value: Any, visit: Callable[[Any], Any] | None = None) -> Any:
        """Unwrap arrays of this trace; other arrays stay as they are, though the function may write into them."""
        if type(value) is not Tracer:
            return map_items(visit or self.unwrap_traced, value)
        if value._namespace is not self and value._namespace.is_closed:
            raise value._namespace.ended("unwrap")
        if self.is_closed:
            raise self.ended("unwrap")
        return value._value

    def unwrap_result(self, value: Any) -> Any:
        """Unwrap an array that the function returns; a plain one that it has written is not used by others."""
        written = (root_of(constant.array) for constant in self.constants.values() if constant.is_written())
        is_written = isinstance(value, np.ndarray) and any(root is root_of(value) for root in written)
        return np.array(value) if is_written else self.unwrap_traced(value)

    def read(self, x: Tracer, use: str) -> Any:
        """Raise JitError, since values differ from run to run."""
        if self.is_closed:
            raise self.ended("read")
        if use == WRITE:
            raise JitError(f"{WRITE}, which later runs would not repeat; {CREATE}")
        hint = "use functions of array_namespace(x), or pass the number as an argument of the function"
        raise JitError(f"{use} reads values of a traced array on the host, which may differ in the next call; {hint}")

    def _constant(self, array: Any) -> Any:
        """Return a plain array as it is now, whatever the function writes into it later."""
        if id(array) in self._copies:
            return array
        check_class(array)
        constant = self.constants.setdefault(id(array), Constant(array, []))
        if not constant.copies or not constant.has_values_of_last_copy():
            copy, end = self.base.library.keep(array)
            constant.copies.append(copy)
            self._copies.add(id(copy))
            self._ends += [] if end is None else [end]
        return constant.copies[-1]

    def keep_for_inner(self, value: Any) -> tuple[Any, Callable[[], bool] | None]:
        """Return an array for the derivative of an inner function, and a function that tells whether it was written."""
        if type(value) is not Tracer:
            constant = self.wrap(self.unwrap(value))
            constant._origin = PLAIN
            return constant, None
        start, root = len(self.calls), root_of(value._value)
        return value, lambda: not any(root_of(y) is root for call in self.calls[start:] for y in call.outputs)

    def write_item(self, x: Tracer, key: Any, value: Any) -> None:
        """Assign in place, as NumPy does."""
        target, value = self.unwrap(x), self._unwrap_written(value)
        key = self.unwrap(key) if np.ndim(value) == 0 else self._unwrap_key(key)  # how many elements does not matter
        if x._origin is NUMBER:
            target = target[()]  # which NumPy refuses to write
        target[key] = value
        sources = [y for y in (*items_of(key), value) if isinstance(y, np.ndarray)]
        overlaps = any(np.may_share_memory(target, y) for y in sources)  # so it must be made once
        if overlaps or not _lower("setitem", target, (target, value, key), {}):
            self._append(operator.setitem, (target, key, value), (target,))

    def update(self, x: Tracer, name: str, other: Any) -> Tracer:
        """Compute `x op= other` in place, as NumPy does, for the operator with this name, such as "add"; return x."""
        target, other = self.unwrap(x), self._unwrap_written(other)
        if not _lower_update(name, target, other):
            function = getattr(operator, f"__i{name}__")
            function(target, other)
            self._append(function, (target, other), (target,))
        return x

    def _unwrap_written(self, value: Any) -> Any:
        """Unwrap values that are written; those of an inner trace would lose their derivative."""
        if any(type(x) is Tracer and x._namespace.trace_level for x in items_of(value)):
            raise DifferentiationError(WRITES_OUTER)
        return self.unwrap(value)

    def _unwrap_key(self, key: Any) -> Any:
        """Return an index with plain integer arrays."""
        for item in key if isinstance(key, tuple) else (key,):
            if type(item) is Tracer and item.dtype == np.bool_ and item._origin is not PLAIN:
                problem = "the function indexes with a boolean array, so a size depends on values"
                raise JitError(f"{problem}; use xp.where(mask, x, 0)")
        return self.unwrap(key)

    # --- functions ------------------------------------------------------------------------------------------------

    def ended(self, name: str) -> JitError:
        """Return the error for a use of an array after the end."""
        return JitError(
            f"a traced array was used (by {name!r}) after its function had ended; return arrays from the function "
            "instead of storing them elsewhere"
        )

    def bind(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the traced version of a function of NumPy."""
        if name == "from_dlpack":  # a view by DLPack does not say whose memory it has
            function = self.base.asarray

        @functools.wraps(function)
        def call(*args: Any, **keywords: Any) -> Any:
            if name in _VALUE_DEPENDENT:
                raise JitError(f"the shape of xp.{name}(x) depends on values, which may differ in the next call")
            is_number = name == "asarray" and isinstance(args[0], bool | int | float)
            if is_number or name in ("empty", "full", "ones", "zeros"):  # the function may write into the array
                return self._create(name, function, args, keywords)
            traced = [x for x in items_of((args, keywords)) if type(x) is Tracer]
            if not traced:
                return function(*args, **keywords)
            inner = max(traced, key=lambda x: x._namespace.trace_level)._namespace
            if inner.trace_level:
                return getattr(inner, name)(*args, **keywords)
            if name == "getitem":
                args = (args[0], self._unwrap_key(args[1]))
            unwrap = self.unwrap if name in _TAKES_LISTS else self._unwrap_array
            if name not in _CREATION:
                args = tuple(map(unwrap, args))
                keywords = {key: unwrap(value) for key, value in keywords.items()}
            numbers = {id(x._value) for x in traced if x._origin is NUMBER}

            def given(value: Any) -> Any:  # NumPy makes no views of numbers
                return value[()] if id(value) in numbers else map_items(given, value)

            result = function(*given(args), **given(keywords))
            return self.append_result(name, result, function, args, keywords)

        return call

    def _unwrap_array(self, value: Any) -> Any:
        return self.unwrap(value) if isinstance(value, Tracer | np.ndarray) else value

    def _create(self, name: str, function: Callable[..., Any], args: Any, keywords: dict[str, Any]) -> Tracer:
        result = function(*args, **keywords)
        if name != "empty":
            value = result.flat[0] if result.size else 0
            if not _lower("full", result, (result.shape, value), {}):
                self._append(np.ndarray.fill, (result, value), (result,))
        return self.wrap(result)

    # --- calls ----------------------------------------------------------------------------------------------------

    def append_result(
        self, name: str, result: Any, function: Callable[..., Any], args: tuple[Any, ...], keywords: dict[str, Any]
    ) -> Any:
        """Append a call that returned `result`, unless this is a view of an argument; return it traced."""
        if isinstance(result, tuple | list):
            items = (self.append_result("", x, _item_of(function, i), args, keywords) for i, x in enumerate(result))
            return rebuild_sequence(result, items)
        if not isinstance(result, np.ndarray | np.generic):
            return result
        check_class(result)
        inputs = [x for x in items_of((args, keywords)) if isinstance(x, np.ndarray)]
        # NumPy finds no memory that empty arrays share, and there is nothing to compute.
        if result.size and not any(np.may_share_memory(x, result) for x in inputs):
            is_number, is_writable = isinstance(result, np.generic), result.flags.writeable
            owner = np.asarray(result) if is_writable or is_number else np.array(result)
            if not _lower(name, owner, args, keywords):
                call, arguments = _call_into(owner, function, args, keywords)
                self._append(call, arguments, (owner,))
            result = owner if is_writable or is_number else np.broadcast_to(owner, owner.shape)  # read-only, too
            return self.wrap(result, is_number=is_number)
        return self.wrap(result)

    def select(self, operation: Any, arrays: Any, options: dict[str, Any], dtype: str, *, save: bool) -> Any:
        """Return a kernel of an operation that also appends what it computes, or the definition."""
        kernel = operation.select(self.base, self.unwrap_traced(arrays), options, dtype, save=save)
        return traced_kernel(kernel) if kernel.backend else operation.portable(self, arrays)

    def call_on_host(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function of plain arrays, which returns arrays or None, now and in each run."""
        self.pass_arrays()
        args = tuple(map(self.unwrap, args))
        with setting(ACTIVE_GRAPH, None), native.record(None):  # what the function computes is no part of the graph
            result = function(*args)
        if result is None:
            self._append(function, args, ())
            return None
        return self.append_result("", result, function, args, {})

    def pass_later(self, function: Callable[[Any], Any], x: Tracer) -> None:
        """Call a function of a plain array now and in each run, before the next call on the host or at the end."""
        self._waiting.append((function, self.asarray(x, copy=True)))

    def pass_arrays(self) -> None:
        """Call the functions that wait for it."""
        if self._waiting:
            functions, arrays = zip(*self._waiting, strict=True)
            self._waiting.clear()

            def run(*args: Any) -> None:
                for function, x in zip(functions, args, strict=True):
                    function(x)

            self.call_on_host(run, *arrays)

    def check_range(self, x: Tracer, size: int, check: Callable[[Any], None]) -> None:
        """Let `check(x)` raise an error now and in each run, unless all values are in [0, size)."""
        values = self.unwrap(x)
        check(values)
        is_integer = values.dtype in (np.int32, np.int64)
        is_native = is_integer and native.is_available() and native.can_copy(values, values.dtype)
        if is_native:
            native.call("check_range", (native.contiguous(values),), 0, size)
        self._append(check, (values,), (), is_check=is_native)

    def call_kernel(self, run: Callable[..., Any], args: tuple[Any, ...], *, is_native: bool) -> Any:
        """Call a kernel with plain arguments; return its result traced.

        Args:
            run: Function of the arguments that returns an array or a tuple of arrays, some of which may be arguments.
            args: Arguments, the first of which are options; arrays of this trace are unwrapped.
            is_native: Whether all that it computes are calls of the native library, which record themselves.
        """
        args = self.unwrap(args)
        for x in items_of(args):
            check_class(x)
        if is_native:
            return self.wrap(run(*args))
        with native.record(None):
            result = run(*args)
        results = result if isinstance(result, tuple | list) else (result,)
        inputs = [x for x in items_of(args) if isinstance(x, np.ndarray)]
        if any(id(x) in self._copies for x in results):
            raise JitError("a kernel writes into an array that is not an argument; pass it, with donate_argnums")
        own = set(map(id, inputs))  # most arrays written in place; comparing all memory is quadratic
        fresh = [
            i for i, x in enumerate(results)
            if x is not None and id(x) not in own and not any(np.may_share_memory(x, y) for y in inputs)
        ]  # fmt: skip
        targets = [np.array(results[i]) for i in fresh]  # a result may be a constant, or share memory with another

        def call(targets: Any, *args: Any) -> None:
            new = run(*args)
            new = new if isinstance(new, tuple | list) else (new,)
            for index, target in zip(fresh, targets, strict=True):
                target[...] = new[index]

        in_place = [x for x in results if x is not None and id(x) in own]
        self._append(call, (targets, *args), (*targets, *in_place))
        new = dict(zip(fresh, targets, strict=True))
        outputs = [self.wrap(new.get(index, x)) for index, x in enumerate(results)]
        return tuple(outputs) if isinstance(result, tuple | list) else outputs[0]

    def _append(self, function: Any, args: tuple[Any, ...], outputs: Any, *, is_check: bool = False) -> None:
        for root in map(root_of, outputs):
            if root.flags.owndata and root.flags.forc:  # else its memory is that of others
                self._written[id(root)] = weakref.ref(root)
        args, outputs = map_places(self._place, args), tuple(map(self._place, outputs))
        self.calls.append(Call(function, args, outputs, is_check))

    def _place(self, array: Any) -> Any:
        root = root_of(array)
        written = self._written.get(id(root))
        return array if written is None or written() is not root else Place.of(array, written)


def traced_kernel(kernel: Any) -> Any:
    """Return a kernel of an operation for arrays of a GraphTrace."""

    def is_native(options: Any) -> bool:
        reads_options = any(type(x) is Tracer for x in items_of(options))  # numbers, which the kernel may read
        return kernel.is_recordable and (kernel.records_options or not reads_options)

    def forward(*arrays: Any, save: bool, **options: Any) -> tuple[Any, Any]:
        trace, residuals = next(x._namespace for x in items_of((arrays, options)) if type(x) is Tracer), [None]

        def run(options: Any, *arrays: Any) -> Any:
            output, residuals[0] = kernel.forward(*arrays, save=save, **options)
            return output

        are_known = is_native(options)  # what is read of the residuals
        output = trace.call_kernel(run, (options, *arrays), is_native=are_known)
        return output, (trace, residuals, None if are_known else (arrays, output))

    def vjp(g: Any, saved: Any, needs: Any, **options: Any) -> tuple[Any, ...]:
        trace, residuals, alive = saved  # the residuals may be these arrays, which must keep their memory until now

        def run(options: Any, g: Any, alive: Any) -> Any:
            return tuple(kernel.vjp(g, residuals[0], needs, **options))

        return trace.call_kernel(run, (options, g, alive), is_native=is_native(options))

    return kernel._replace(forward=forward, vjp=None if kernel.vjp is None else vjp)


def _lower(name: str, out: Any, args: tuple[Any, ...], keywords: dict[str, Any]) -> bool:
    """Compute a function by native calls, which record themselves; return False if NumPy must compute it."""
    lowering = LOWERINGS.get(name) if native.is_available() else None
    return lowering is not None and lowering(out, args, keywords)


def _lower_update(name: str, target: Any, other: Any) -> bool:
    """Compute an in-place operator by a native call if it rounds and casts as NumPy does."""
    if name == "matmul" or not isinstance(other, np.ndarray | np.generic | bool | int | float):
        return False
    if isinstance(other, np.ndarray) and other is not target and np.may_share_memory(target, other):
        return False
    is_same = (
        np.result_type(target, other) == target.dtype
        and np.broadcast_shapes(target.shape, np.shape(other)) == target.shape
    )
    return is_same and _lower(f"operator_{name}", target, (target, other), {})


def _call_into(out: Any, function: Callable[..., Any], args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    """Return a function and arguments that compute a result again, into `out`."""
    if isinstance(function, np.ufunc) and not keywords and function.nout == 1:
        return lambda out, *args: function(*args, out=out), (out, *args)

    def call(out: Any, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        value = function(*args, **keywords)
        if np.shape(value) != out.shape:
            raise JitError(
                f"{getattr(function, '__name__', 'a function')} returned shape {np.shape(value)} instead of "
                f"{out.shape}, as the shape depends on values; a function for jit must not compute shapes from values"
            )
        out[...] = value

    return call, (out, args, keywords)


def _item_of(function: Callable[..., Any], index: int) -> Callable[..., Any]:
    """Return a function that returns one item of the result of `function`."""

    @functools.wraps(function)
    def call(*args: Any, **keywords: Any) -> Any:
        return function(*args, **keywords)[index]

    return call


def map_places(function: Callable[[Any], Any], value: Any) -> Any:
    """Apply a function to the arrays, and to each `Place`, in nested tuples, lists and dicts."""
    is_array = isinstance(value, np.ndarray | Place)
    return function(value) if is_array else map_items(functools.partial(map_places, function), value)


def root_of(array: Any) -> Any:
    """Return the array that owns the memory of a view, or of a `Place`: None if it is free."""
    if type(array) is Place:
        return array.root()
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array
