"""`capture(function)`: calls of one signature are recorded once, and replayed from then on."""

from __future__ import annotations

import copy
import functools
import importlib
import threading
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np

from xformer.backends import backend_name, trace_level
from xformer.backends.recording import NAMESPACE, current_tape
from xformer.errors import CaptureError
from xformer.random import Rng
from xformer.replay.arguments import Arguments, arrays_of, check_hashable, namespace_of
from xformer.replay.recording import GraphRecording, Recording, array_copy, recorder
from xformer.threads import available_threads
from xformer.tree import Module, flatten, is_array

_MAX_SIGNATURES, _MAX_BYTES = 64, 2**30  # of one function
_CALLS_PER_RECORDING = 16  # recording takes as long as a few calls, so the other calls must make up for it


def capture(function: Callable[..., Any], *, donate_argnums: Sequence[int] = ()) -> Callable[..., Any]:
    """Return a function that records the array operations of `function` and repeats them without its Python code.

        forward = xf.capture(model)
        logits = forward(source, target)

    As for `jax.jit`, the function must be pure: its result depends on its arguments only, not on Python variables that
    change, and it has no effects. Reading array values outside the recording raises CaptureError.

    The first call of a signature calls the function and records it. The second also compares a replay with the function
    bit for bit, and later ones only replay. If the comparison fails, a warning is issued and the function is called
    from then on. On NumPy a replay repeats the recorded calls in preallocated buffers. On CuPy it launches a CUDA
    graph. With JAX the function is compiled by `jax.jit`. With other libraries, and in a trace, the function is called.
    After 64 recordings at most every 16th call is recorded, so a function whose signatures never repeat mostly runs
    uncaptured.

    The signature consists of the shapes and dtypes of arrays, of the identity of Modules, and of all other arguments,
    which must be hashable. A replay reads the parameters of a Module where they are, so it sees what an optimizer
    changes in place; other arrays are copied. Arrays that the function does not get as arguments are constants, and so
    are random numbers, unless they are drawn from an argument made by `Rng.with_counter`. Pass numbers that change in
    each call, such as token ids, as arrays: every other list of numbers is another signature.

    Args:
        function: Function of Modules, arrays and other values, and of tuples, lists and dicts of them. It uses the
            functions of `array_namespace(x)`. It must not read values of arrays on the host (`float(x)`,
            `np.asarray(x)`, `buffer[i] = x`), compute shapes from values (`x[x > 0]`), or change arguments except
            donated ones.
        donate_argnums: Positions of arguments whose arrays the function may overwrite, such as the model and the state
            of an optimizer, or a `StaticCache`. Other arrays at these positions are another signature.

    Returns:
        A function with the same arguments and results. Arrays of results are new, except those of Modules and donated
        arguments. Other values in a result are those of the recording.

    Raises:
        CaptureError: When called, if the function reads values on the host, computes shapes from values or arrays of
            dtype object, or an argument is not hashable.
    """
    return functools.update_wrapper(_Captured(function, tuple(donate_argnums)), function, updated=())


def capture_if_repeated(function: Callable[..., Any], *, donate_argnums: Sequence[int] = ()) -> Callable[..., Any]:
    """Return a function that is recorded at the second call of a signature, if it can be; see `capture`."""
    captured = _Captured(function, tuple(donate_argnums), num_eager=1, is_optional=True)
    return functools.update_wrapper(captured, function, updated=())


class _Entry:
    """The recordings of one signature.

    Attributes:
        num_calls: Number of calls so far.
        modules: The Modules whose identity is part of the signature.
        is_checked: Whether a replay has returned the same bits as the function.
        arguments: Arguments of the recorded call. They keep the Modules alive.
        idle: Recordings that no thread is using.
    """

    def __init__(self, modules: Sequence[Module]) -> None:
        self.num_calls, self.is_checked = 0, False
        self.modules = [weakref.ref(module) for module in modules]
        self.arguments: Any = None
        self.idle: list[Recording | GraphRecording] = []


class _Captured:
    """A captured function.

    Args:
        function: The function.
        donated: Positions of arguments that it may overwrite.
        num_eager: Number of calls of a signature before it is recorded.
        is_optional: Whether to call the function itself if it cannot be recorded; otherwise CaptureError is raised.
    """

    def __init__(
        self, function: Callable[..., Any], donated: tuple[int, ...], num_eager: int = 0, is_optional: bool = False
    ) -> None:
        self._num_eager, self._is_optional = num_eager, is_optional
        # A Module that is called, or whose method is called, is an argument too.
        method = type(function).__call__ if isinstance(function, Module) else function
        module = function if isinstance(function, Module) else getattr(function, "__self__", None)
        self._leading = (module,) if isinstance(module, Module) else ()
        self._function = getattr(method, "__func__", method) if self._leading else function
        self._donated = tuple(index + len(self._leading) for index in donated)
        self._entries: OrderedDict[Hashable, _Entry] = OrderedDict()
        self._jitted: dict[Hashable, Callable[..., Any]] = {}
        self._lock = threading.Lock()
        self._is_eager = False  # after a replay that differed
        self._num_calls = self._num_recordings = 0

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        args = (*self._leading, *args)
        xp = namespace_of((*args, *keywords.values()))
        if self._is_eager or xp is None or xp is NAMESPACE or current_tape() is not None or trace_level(xp):
            return self._function(*args, **keywords)
        new_recording = recorder(xp)
        try:
            if backend_name(xp) == "jax":
                return self._jit(args, keywords)
            if new_recording is not None:
                return self._record_or_replay(new_recording, args, keywords)
        except (AttributeError, CaptureError, TypeError, ValueError) as error:
            if not self._is_optional:  # NumPy may have replaced a CaptureError by a ValueError
                raise error.__cause__ if isinstance(error.__cause__, CaptureError) else error from None
            self._is_eager = True
        return self._function(*args, **keywords)

    def _record_or_replay(self, new_recording: Callable[..., Any], args: Any, keywords: dict[str, Any]) -> Any:
        arguments = Arguments(args, keywords, self._donated)
        entry, recording, may_record = self._find((arguments.signature, available_threads()), arguments.modules)
        if recording is None and not may_record:
            return self._function(*args, **keywords)
        if recording is None:
            recording = new_recording(self._function, *arguments.replace_data(array_copy))
            result, recording.result, entry.arguments = recording.result, None, arguments
        elif isinstance(recording, Recording) and not entry.is_checked:
            result = self._compare(recording, arguments)
            entry.is_checked = True
        else:
            result = recording.replay(arguments.data)
        with self._lock:
            entry.idle.append(recording)
        return result

    def _find(self, key: Hashable, modules: Sequence[Module]) -> tuple[_Entry, Any, bool]:
        """Return the entry of a signature, a recording or None, and whether to record this call."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is None or any(module() is None for module in entry.modules):  # whose id another Module may have
                entry = self._entries[key] = _Entry(modules)
            self._entries.move_to_end(key)
            entry.num_calls += 1
            self._num_calls += 1
            if entry.idle:
                return entry, entry.idle.pop(), False
            allowed = _MAX_SIGNATURES + self._num_calls // _CALLS_PER_RECORDING
            may_record = entry.num_calls > self._num_eager and self._num_recordings < allowed
            self._num_recordings += may_record
            sizes = [sum(recording.nbytes for recording in entry.idle) for entry in self._entries.values()]
            if len(sizes) > _MAX_SIGNATURES or (len(sizes) > 1 and sum(sizes) > _MAX_BYTES):
                self._entries.popitem(last=False)
            return entry, None, may_record

    def _compare(self, recording: Recording, arguments: Arguments) -> Any:
        """Replay, and compare with the function, which is called with copies of donated arguments."""
        args = [copy.deepcopy(arg) if i in self._donated else arg for i, arg in enumerate(arguments.args)]
        expected = self._function(*args, **arguments.keywords)
        result = recording.replay(arguments.data)
        donated, copies = ([list(arrays_of(values[i])) for i in self._donated] for values in (arguments.args, args))
        if _is_same(result, expected) and _is_same(donated, copies):
            return result
        self._is_eager = True
        name = getattr(self._function, "__name__", type(self._function).__name__)
        warnings.warn(
            f"a replay of {name} differs from the function, which is called from now on; does it change its arguments, "
            "or use arrays that are not arguments, or random numbers without Rng.with_counter?",
            stacklevel=4,
        )
        for target, source in zip(flatten(donated)[0], flatten(copies)[0], strict=True):
            target[...] = source
        return expected

    def _jit(self, args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
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
        try:
            return self._jitted[key]([leaf for leaf, array in zip(counters, is_array, strict=True) if array])
        except (jax.errors.JAXTypeError, jax.errors.JAXIndexError) as error:
            raise CaptureError(f"JAX cannot compile the captured function: {str(error).splitlines()[0]}") from error


def _is_same(actual: Any, expected: Any) -> bool:
    """Return whether two results have the same structure, bits of arrays, numbers and strings."""
    if isinstance(actual, tuple | list | dict):
        if type(actual) is not type(expected) or len(actual) != len(expected):
            return False
        keys = actual if isinstance(actual, dict) else range(len(actual))
        return all(_is_same(actual[key], expected[key]) for key in keys)
    if isinstance(actual, int | float | str) and not is_array(actual):
        return repr(actual) == repr(expected)
    x, y = flatten(actual)[0], flatten(expected)[0]
    return len(x) == len(y) and all(map(_equal_bits, x, y))


def _equal_bits(x: Any, y: Any) -> bool:
    return bool(x.shape == y.shape and x.dtype == y.dtype and x.tobytes() == y.tobytes())
