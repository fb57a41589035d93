"""`jit(function)`: a function is traced once for each signature, and runs without its Python code from then on."""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
import threading
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np

from xformer import native
from xformer.backends.array_types import P, R
from xformer.backends.arrays import is_of_numpy
from xformer.errors import ConfigError, JitError
from xformer.random import Rng
from xformer.threads import available_threads
from xformer.tracing.activations import is_observing
from xformer.tracing.arguments import Arguments, arrays_of, check_function, check_hashable, check_static, namespace_of
from xformer.tracing.graph import ACTIVE_GRAPH
from xformer.tracing.namespace import innermost_trace
from xformer.tracing.program import Intervals, Program, array_copy, compiler
from xformer.tree import Module

_MAX_SIGNATURES, _MAX_BYTES = 64, 2**30  # of one function
_ALIASES = "the function writes into an argument that shares memory with another array; pass a copy of one of them"
_REFUSED = "the function takes no arrays of CuPy in place of NumPy's, and is called without a CUDA graph"
_CALLS_PER_TRACE = 16  # tracing takes as long as a few calls, so the other calls must make up for it


def jit(
    function: Callable[P, R],
    *,
    static_argnums: int | Sequence[int] = (),
    donate_argnums: int | Sequence[int] = (),
    torch_compile: bool = False,
) -> Callable[P, R]:
    """Return a function that computes `function` without its Python code, from the second call of a signature on.

        forward = xf.jit(model)
        logits = forward(source, target)

    As for `jax.jit`, the function must be pure: its result depends on its arguments only, not on Python variables that
    change, and it has no effects. It is traced at the first call of each signature. Reading values of an argument on
    the host, as `float(x)` and `if x > 0` do, raises JitError then, and so do shapes that depend on values.

    On NumPy the traced calls run in preallocated buffers, most of them by one call of the native library, with the same
    bits as the function, except for the sign of NaN; for an argument that is not contiguous, they are those for a
    contiguous copy, since NumPy's rounding depends on strides. On CuPy they are one CUDA graph from the third call on;
    all graphs of a thread use the same memory, so that it is as large as the largest of them needs, and arrays of NumPy
    are moved to the GPU. JAX compiles the function by `jax.jit`. With other libraries, in a derivative, and inside
    another function for jit, the function is called.

    The signature consists of the shapes and dtypes of arrays, of the identity of Modules, and of all other arguments,
    which must be hashable. The parameters of a Module are read where they are, so changes that an optimizer makes in
    place are seen; other arrays are copied, and copied back if the function writes into them. Arrays that the function
    does not get as arguments are constants, which are read where they are, and so are random numbers, unless they are
    drawn from an argument made by `Rng.with_counter`. Pass numbers that change in each call, such as token ids, as
    arrays: every other list of numbers is another signature.

    The programs of 64 signatures, or of at most 1 GiB (on CuPy, whose results take at most a quarter of the memory of
    the GPU), are kept. After 64 traces at most every 16th call is traced and
    the others call the function, so signatures that never repeat take no longer than without jit.

    Args:
        function: Function of Modules, arrays and other values, and of tuples, lists and dicts of them. It uses the
            functions of `array_namespace(x)`; on CuPy it does not change arguments except donated ones.
        static_argnums: Positions of arguments that are no arrays, such as configurations. Every other value is another
            signature. Numbers, strings and None need not be named.
        donate_argnums: Positions of arguments whose arrays the function uses without a copy, such as the model and the
            state of an optimizer, or the cache that `to_static` returns, which it overwrites. Other arrays at these
            positions are another signature.
        torch_compile: Whether to compile the function by `torch.compile` for arrays of torch, which takes a minute for
            a large model; otherwise it is called.

    Returns:
        A function with the same arguments and results. Arrays of results are new, except those of Modules and donated
        arguments. Other values in a result are those of the trace.

    Raises:
        ConfigError: If an argument is static and donated.
        JitError: When called, if the function reads values on the host, computes shapes from values or arrays of
            dtype object, or an argument is not hashable.
        BackendError: When called, if it uses arrays of a subclass of np.ndarray other than np.memmap.
    """
    check_function("jit", function)
    static, donated = ((x,) if isinstance(x, int) else tuple(x) for x in (static_argnums, donate_argnums))
    if {*static} & {*donated}:
        raise ConfigError(f"static_argnums {static} and donate_argnums {donated} overlap; expected different arguments")
    jitted = _Jitted(function, donated, static=static, torch_compile=torch_compile)
    return functools.update_wrapper(jitted, function, updated=())


def jit_repeated(function: Callable[..., Any], *, donate_argnums: Sequence[int] = ()) -> _Jitted:
    """Return a function that is traced at the second call of a signature on NumPy; see `jit`."""
    jitted = _Jitted(function, tuple(donate_argnums), num_eager=1)
    functools.update_wrapper(jitted, function, updated=())
    return jitted


def has_effect(xp: Any) -> bool:
    """Return whether `jit` does more than call a function of arrays of a library."""
    return xp.name == "jax" or compiler(xp) is not None


class _Entry:
    """The programs of one signature.

    Attributes:
        num_calls: Number of calls so far.
        modules: The Modules whose identity is part of the signature.
        arguments: Arguments of the traced call. They keep the Modules alive.
        shared: The memory that programs read and write where it is: of Modules and donated arguments.
        idle: Programs that no thread is using.
        is_refused: There can be no program.
    """

    def __init__(self, modules: Sequence[Module]) -> None:
        self.num_calls = 0
        self.modules = [weakref.ref(module) for module in modules]
        self.arguments: Any = None
        self.shared: Intervals | None = None
        self.idle: list[Program] = []
        self.is_refused = False


def _check_written(program: Any, data: Sequence[Any]) -> None:
    """Raise JitError if the function writes into an argument that is read-only or shares memory with another array."""
    for position in program.written:
        array = data[position]
        if not array.flags.writeable:
            raise JitError("the function writes into an argument that is read-only; pass a copy")
        others = [*(other for i, other in enumerate(data) if i != position), *program.constants]
        if any(np.may_share_memory(array, other) for other in others):
            raise JitError(_ALIASES)


class _Jitted:
    """A function with its programs.

    Args:
        function: The function.
        donated: Positions of arguments that it may overwrite.
        num_eager: Number of calls of a signature before it is traced.
        static: Positions of arguments that are no arrays.
        torch_compile: Whether to compile the function for arrays of torch.

    Attributes:
        num_runs: Number of calls without the Python code of the function.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        donated: tuple[int, ...],
        *,
        num_eager: int = 0,
        static: tuple[int, ...] = (),
        torch_compile: bool = False,
    ) -> None:
        self._num_eager, self._torch_compile = num_eager, torch_compile
        # A Module that is called, or whose method is called, is an argument too.
        method = type(function).__call__ if isinstance(function, Module) else function
        module = function if isinstance(function, Module) else getattr(function, "__self__", None)
        self._leading = (module,) if isinstance(module, Module) else ()
        self._function = getattr(method, "__func__", method) if self._leading else function
        self._donated, self._static = (
            tuple(index + len(self._leading) for index in indices) for indices in (donated, static)
        )
        self._entries: OrderedDict[Hashable, _Entry] = OrderedDict()
        self._jitted: dict[Hashable, Callable[..., Any]] = {}
        self._last: tuple[dict[Any, Any], Any] = {}, None  # known arguments of the last program, and its namespace
        self._lock = threading.Lock()
        self._num_calls = self._num_traces = self.num_runs = 0

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        args = (*self._leading, *args)
        for index in self._static:
            check_static(args, index)
        xp = self._namespace(args, keywords)
        is_inside = innermost_trace() is not None or ACTIVE_GRAPH.get() is not None  # whose arrays it may close over
        if xp is None or xp.is_trace or is_inside or is_observing():
            return self._function(*args, **keywords)
        if xp.name == "jax":
            return self._compile_by_jax(args, keywords)
        if self._torch_compile and xp.name == "torch":
            if not self._jitted:
                self._jitted["torch"] = importlib.import_module("torch").compile(self._function)
            return self._jitted["torch"](*args, **keywords)
        new_program = compiler(xp)
        if new_program is None:
            return self._function(*args, **keywords)
        arguments = Arguments(args, keywords, self._donated, self._last[0])
        arrays = itertools.chain(arguments.data, arrays_of(arguments.modules))
        # A capture is of a stream of the current device.
        with (xp.other_device and xp.other_device(arrays)) or contextlib.nullcontext():
            return self._run(xp, new_program, arguments, args, keywords)

    def _namespace(self, args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """Return the namespace of the arguments; those that the last program had too are not looked at again."""
        known, own = self._last
        values = (*enumerate(args), *keywords.items())
        others = [value for key, value in values if key not in known or known[key].value is not value]
        if len(others) < len(values) and namespace_of(others) is own:
            return own
        return namespace_of([value for _, value in values])

    def _run(
        self, xp: Any, new_program: Callable[..., Any], arguments: Arguments, args: Any, keywords: dict[str, Any]
    ) -> Any:
        key = arguments.signature, available_threads(), native.is_reproducible()
        entry, program, may_trace = self._find(key, arguments.modules, xp)
        if entry.shared is None:
            donated = list(arrays_of([args[index] for index in self._donated if index < len(args)]))
            entry.shared = Intervals([*arrays_of(arguments.modules), *donated])
            entry.is_refused = xp.name != "numpy" and any(map(is_of_numpy, donated))
        is_mixed = xp.name != "numpy" and any(map(is_of_numpy, arguments.data))
        if any(map(entry.shared.overlap, arguments.data)):
            result = self._function(*args, **keywords)  # which sees writes into either array
        elif program is not None:
            _check_written(program, arguments.data)
            result = program.run(arguments.data)
        elif may_trace and not entry.is_refused:
            try:
                copies = arguments.replace_data(functools.partial(array_copy, xp=xp))
                program = new_program(self._function, *copies, arguments.numbers)
            except (TypeError, ValueError) as error:  # NumPy's, for a traced array as an element of a plain one
                if isinstance(error.__cause__, JitError):
                    raise error.__cause__ from None
                if not is_mixed:
                    raise
                entry.is_refused = True
                warnings.warn(f"{_REFUSED}: {error}", stacklevel=3)
                return self._function(*args, **keywords)
            _check_written(program, arguments.data)
            program.write_back(arguments.data)
            result, program.result, entry.arguments = program.result, None, arguments
        else:
            return self._function(*args, **keywords)
        if program is not None:
            self._last = arguments.known, xp
            with self._lock:
                entry.idle.append(program)
        return result

    def _find(self, key: Hashable, modules: Sequence[Module], xp: Any) -> tuple[_Entry, Any, bool]:
        """Return the entry of a signature, a program or None, and whether to trace this call."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is None or any(module() is None for module in entry.modules):  # whose id another Module may have
                entry = self._entries[key] = _Entry(modules)
            self._entries.move_to_end(key)
            entry.num_calls += 1
            self._num_calls += 1
            if entry.idle:
                self.num_runs += 1
                return entry, entry.idle.pop(), False
            allowed = _MAX_SIGNATURES + self._num_calls // _CALLS_PER_TRACE
            num_eager = self._num_eager if xp.name == "numpy" else 0  # the first calls of a graph take no longer
            may_trace = entry.num_calls > num_eager and self._num_traces < allowed and not entry.is_refused
            self._num_traces += may_trace
            sizes = [sum(program.nbytes for program in entry.idle) for entry in self._entries.values()]
            if len(sizes) > _MAX_SIGNATURES or (len(sizes) > 1 and sum(sizes) > xp.program_bytes(_MAX_BYTES)):
                self._entries.popitem(last=False)
            return entry, None, may_trace

    def _compile_by_jax(self, args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """Compile by JAX for the arrays among the arguments; everything else is static."""
        jax: Any = importlib.import_module("jax")
        leaves, structure = jax.tree.flatten((args, keywords))
        counters = [leaf.counter if isinstance(leaf, Rng) else leaf for leaf in leaves]
        is_array = tuple(isinstance(leaf, jax.Array | np.ndarray) for leaf in counters)
        static = tuple(
            None if array and not isinstance(leaf, Rng) else leaf for leaf, array in zip(leaves, is_array, strict=True)
        )
        for leaf in static:
            check_hashable(leaf)
        key = structure, static, is_array
        if key not in self._jitted:

            def function(arrays: list[Any]) -> Any:
                remaining = iter(arrays)
                merged = [
                    leaf if not array else leaf.with_counter(next(remaining)) if leaf is not None else next(remaining)
                    for leaf, array in zip(static, is_array, strict=True)
                ]
                args, keywords = jax.tree.unflatten(structure, merged)
                return self._function(*args, **keywords)

            self._jitted[key] = jax.jit(function)
        self.num_runs += 1
        try:
            return self._jitted[key]([leaf for leaf, array in zip(counters, is_array, strict=True) if array])
        except (jax.errors.JAXTypeError, jax.errors.JAXIndexError) as error:
            raise JitError(f"JAX cannot compile the function: {str(error).splitlines()[0]}") from error
