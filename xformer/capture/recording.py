"""`Recording`: one function on arrays of fixed shapes, recorded once and replayed."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from xformer.backends import recording as tape_of
from xformer.backends.recording import plain
from xformer.capture.memory import share_memory
from xformer.tree import Module, flatten


class Recording:
    """The array operations of one call `function(*args)` on NumPy.

    Args:
        function: A function whose arguments and result are trees of arrays; an argument may also be an object with
            arrays among its attributes, such as a StaticCache, which the function updates in place.
        args: Arguments. A replay reads their arrays where they are, so write other values into them first.

    Attributes:
        result: Result of the first call.
        nbytes: Size of the memory of temporaries.

    Raises:
        CaptureError: If the function reads values on the host.
    """

    def __init__(self, function: Callable[..., Any], args: Sequence[Any]) -> None:
        self._args = args  # keeps the arrays alive
        memo: dict[int, Any] = {}
        with tape_of.recording() as tape:
            result = _map(tape_of.recorded, function(*(_map(tape_of.recorded, arg, memo) for arg in args)), {})
        result = _map(plain, result, {})
        outputs = flatten(result)[0]
        calls, self.nbytes = share_memory(tape, outputs)
        self._calls = [
            (functools.partial(call.function, **call.keywords) if call.keywords else call.function, call.args)
            for call in calls
        ]
        self._result = _Result(result, {_memory_of(array): array for array in flatten(_arrays_of(args))[0]}, args)
        self.result = self._result.build()

    def replay(self) -> Any:
        """Make the calls again; return the result in arrays of its own, except for arrays of the arguments."""
        for function, args in self._calls:
            function(*args)
        return self._result.build()


class _Result:
    """A result whose fresh arrays are copied each time, and whose other arrays are those of the arguments."""

    def __init__(self, tree: Any, inputs: dict[Any, Any], args: Sequence[Any]) -> None:
        self._build = _builder(tree, inputs, [arg for arg in _nodes(args) if isinstance(arg, Module)])

    def build(self) -> Any:
        return self._build()


def _builder(tree: Any, inputs: dict[Any, Any], modules: list[Any]) -> Callable[[], Any]:
    """Return a function that builds the result; parts without fresh arrays are built once."""
    leaves, rebuild = flatten(tree)
    known = [inputs.get(_memory_of(leaf)) for leaf in leaves]
    if all(array is not None for array in known):
        for module in modules:
            if type(module) is type(tree) and list(map(id, flatten(module)[0])) == list(map(id, known)):
                return lambda: module
        constant = rebuild(known)
        return lambda: constant
    if isinstance(tree, tuple | list) and not isinstance(tree, Module):
        builders = [_builder(item, inputs, modules) for item in tree]
        make = type(tree)._make if hasattr(tree, "_fields") else type(tree)  # type: ignore[union-attr]
        return lambda: make(build() for build in builders)
    return lambda: rebuild([leaf.copy() if array is None else array for leaf, array in zip(leaves, known, strict=True)])


def _memory_of(array: Any) -> Any:
    return array.ctypes.data, array.shape, array.strides, array.dtype.str


def _nodes(value: Any) -> Any:
    yield value
    if isinstance(value, tuple | list):
        for item in value:
            yield from _nodes(item)


def _arrays_of(value: Any) -> Any:
    """Return nested lists of the arrays of arguments, objects included."""
    if isinstance(value, tuple | list):
        return [_arrays_of(item) for item in value]
    if has_arrays(value):
        return [array for array in value.arrays() if array is not None]
    return value


def has_arrays(value: Any) -> bool:
    """Return whether a value is an object that holds arrays, such as a StaticCache."""
    return not isinstance(value, Module) and callable(getattr(value, "arrays", None))


def _map(function: Callable[[Any], Any], value: Any, memo: dict[int, Any]) -> Any:
    """Return a tree with other arrays; objects with arrays are copied, and keep what they share."""
    if isinstance(value, np.ndarray):
        return function(value)
    if isinstance(value, Module):
        leaves, rebuild = flatten(value)
        return rebuild([function(leaf) for leaf in leaves])
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_map(function, item, memo) for item in value))
    if isinstance(value, tuple | list):
        return type(value)(_map(function, item, memo) for item in value)
    if isinstance(value, dict):
        return {name: _map(function, item, memo) for name, item in value.items()}
    if type(value).__module__.startswith("xformer.") and hasattr(value, "__dict__") and not isinstance(value, type):
        if id(value) not in memo:
            memo[id(value)] = duplicate = copy.copy(value)
            duplicate.__dict__.update({name: _map(function, item, memo) for name, item in vars(value).items()})
        return memo[id(value)]
    return value
