"""Arguments of a function for jit: their signature, and the arrays that a program copies or uses in place."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from types import FunctionType, MappingProxyType, ModuleType
from typing import Any, NamedTuple

import numpy as np

from xformer.backends import array_namespace, dtype_name, is_floating
from xformer.backends.arrays import check_class, is_of_numpy
from xformer.errors import ConfigError, JitError, describe_type
from xformer.random import Rng
from xformer.tree import Module, first_array, flatten, is_array, items_of, map_items, rebuild_sequence


class Known(NamedTuple):
    """An argument of an earlier call that holds no data and cannot change: it need not be scanned again."""

    value: Any
    signature: Hashable
    modules: tuple[Module, ...]


class Arguments:
    """The arguments of one call.

    Args:
        args: Positional arguments.
        keywords: Keyword arguments.
        donated: Positions of arguments whose arrays the function may overwrite.
        known: Arguments of an earlier call, by position or name.

    Attributes:
        data: Arrays whose values differ between the calls of a signature.
        modules: Modules, whose identity is part of the signature.
        numbers: Positions of data that are immutable numbers, such as numpy.float64.
        signature: Hashable; equal for calls that one program serves.
        known: The arguments that need not be scanned again, by position or name.
    """

    def __init__(
        self,
        args: tuple[Any, ...],
        keywords: dict[str, Any],
        donated: Sequence[int],
        known: Mapping[int | str, Known] = MappingProxyType({}),
    ) -> None:
        self.args, self.keywords, self._donated = args, keywords, donated
        self.data: list[Any] = []
        self.numbers: list[int] = []
        self.modules: list[Module] = []
        self.known: dict[int | str, Known] = {}
        self.signature: Hashable = (
            *(self._signature(index, arg, index in donated, known.get(index)) for index, arg in enumerate(args)),
            *((name, self._signature(name, keywords[name], False, known.get(name))) for name in sorted(keywords)),
        )

    def _signature(self, key: int | str, value: Any, donated: bool, known: Known | None) -> Hashable:
        if known is None or known.value is not value:
            num_modules, self._is_settled = len(self.modules), True
            signature = self._scan(value, donated)
            if not self._is_settled:
                return signature
            known = Known(value, signature, tuple(self.modules[num_modules:]))
        else:
            self.modules.extend(known.modules)
        self.known[key] = known
        return known.signature

    def _scan(self, value: Any, donated: bool) -> Hashable:
        """Return the signature of a value, collect its data, and note whether it is the same in each call."""
        if isinstance(value, Module):
            self.modules.append(value)
            return id(value)  # frozen: the same arrays
        if holds_arrays(value):
            self._is_settled = False
            return (id(value), *map(id, value.arrays()))
        if is_array(value):
            check_class(value)
            if donated:
                return id(value)
            self._is_settled = False
            is_number = isinstance(value, np.generic)
            self.numbers += [len(self.data)] if is_number else []
            self.data.append(value)
            return tuple(value.shape), dtype_name(value.dtype), getattr(value, "strides", None), is_number
        if isinstance(value, Rng):
            return value.key, None if value.counter is None else self._scan(value.counter, donated)
        self._is_settled &= not isinstance(value, dict | list)
        if isinstance(value, dict):
            return (dict, *((key, self._scan(item, donated)) for key, item in value.items()))
        if isinstance(value, tuple | list):
            return (type(value), *(self._scan(item, donated) for item in value))
        if isinstance(value, float):
            return float, value.hex()  # -0.0 equals 0.0, and NaN differs from itself
        check_hashable(value)
        is_function = isinstance(value, FunctionType) and not {*value.__dict__} - {"__wrapped__"}
        self._is_settled &= value is None or is_function or not has_identity_hash(value)
        return type(value), value

    def replace_data(self, function: Callable[[Any], Any]) -> tuple[tuple[Any, ...], dict[str, Any], list[Any]]:
        """Return the arguments with `function(array)` for all data, and the list of these arrays."""
        data = [function(array) for array in self.data]
        remaining = iter(data)  # one for each argument, even if the same array is passed twice

        def visit(value: Any, donated: bool) -> Any:
            if isinstance(value, Rng):
                return value if value.counter is None else value.with_counter(visit(value.counter, donated))
            if isinstance(value, dict):
                return {key: visit(item, donated) for key, item in value.items()}
            if isinstance(value, tuple | list):
                return rebuild_sequence(value, (visit(item, donated) for item in value))
            return next(remaining) if is_array(value) and not donated else value

        args = tuple(visit(arg, index in self._donated) for index, arg in enumerate(self.args))
        return args, {name: visit(value, False) for name, value in sorted(self.keywords.items())}, data


def check_function(name: str, function: Any, axes: Any = 0, word: str = "argnums") -> None:
    """Raise ConfigError unless the arguments of a transformation are a function and, if there are any, positions."""
    if not callable(function):
        raise ConfigError(f"{name} got {function!r}; expected a function")
    items = axes if isinstance(axes, tuple | list) else (axes,)
    if any(isinstance(item, float) or (is_array(item) and item.shape) for item in items):
        raise ConfigError(f"{name} got {word} {axes!r:.60}; expected a position; call {name}(f)(x) for the value at x")


def with_arrays(tree: Any, like: Any) -> Any:
    """Return a tree with arrays in place of numbers; floats get the dtype of `like`."""
    if type(tree) in (bool, int, float, complex):
        dtype = like.dtype if type(tree) is float and is_floating(like.dtype) else None
        return array_namespace(like).asarray(tree, dtype=dtype)
    return map_items(lambda item: with_arrays(item, like), tree)


def check_hashable(value: Any) -> None:
    """Raise JitError for an argument that can be no part of a signature, or hides arrays in its attributes."""
    try:
        hash(value)
    except TypeError as error:
        expected = "expected Modules, arrays, hashable values, and tuples, lists and dicts of them"
        raise JitError(f"an argument of a function for jit has type {type(value).__name__}; {expected}") from error
    if hides_arrays(value):
        problem = f"an argument of a function for jit is {describe_type(value)} with arrays in its attributes"
        raise JitError(f"{problem}; pass its arrays, or a tuple or dict of them")


def has_identity_hash(value: Any) -> bool:
    """Return whether the hash of an object does not depend on its attributes."""
    cls: Any = type(value)
    return cls.__hash__ is object.__hash__


def hides_arrays(value: Any) -> bool:
    """Return whether an object that is hashed by its identity has arrays in its attributes, or a container has one."""
    return any(
        has_identity_hash(item)
        and not holds_arrays(item)
        and not any(True for _ in arrays_of(item))
        and _reaches_array(item, {})
        for item in items_of(value)
    )


def _reaches_array(value: Any, seen: dict[int, Any]) -> bool:
    """Return whether a value is or contains an array, also in the attributes of objects that may change."""
    is_code = isinstance(value, type | ModuleType) or "__wrapped__" in getattr(value, "__dict__", ())
    if is_code or id(value) in seen:
        return False
    seen[id(value)] = value
    if isinstance(value, dict):
        items = tuple(value.values())
    elif isinstance(value, tuple | list | set):
        items = tuple(value)
    elif any(True for _ in arrays_of(value)):
        return True
    elif (has_identity_hash(value) or not isinstance(value, Hashable)) and not _is_frozen_dataclass(value):
        items = (object.__getstate__(value),)
    else:
        return False
    return any(_reaches_array(item, seen) for item in items)


def _is_frozen_dataclass(value: Any) -> bool:
    return bool(getattr(getattr(value, "__dataclass_params__", None), "frozen", False))


def check_static(args: tuple[Any, ...], index: int) -> None:
    """Raise JitError if a static argument is an array or a tree of arrays, or is not hashable."""
    if index < len(args) and any(True for _ in arrays_of(args[index])):
        raise JitError(f"argument {index} is static but contains arrays; expected a value that can be hashed")
    if index < len(args):
        check_hashable(args[index])


def holds_arrays(value: Any) -> bool:
    """Return whether a value is an object that updates its arrays in place, such as a DecodingCache."""
    return not isinstance(value, Module) and callable(getattr(value, "arrays", None))


def arrays_of(value: Any) -> Iterator[Any]:
    """Yield the arrays of arguments, also those of objects and of Rngs."""
    for item in items_of(value):
        if type(item) is np.ndarray:
            yield item
        elif holds_arrays(item):
            yield from (array for array in item.arrays() if array is not None)
        else:
            yield from flatten(item.counter if isinstance(item, Rng) else item)[0]


def namespace_of(value: Any) -> Any:
    """Return the namespace of arguments, that of a trace if one is traced; None without arrays.

    NumPy arrays beside those of another library are moved by the function; only JAX and CuPy have programs of that.
    """
    arrays: list[Any] = []
    for item in value:
        if type(item) is np.ndarray:
            arrays.append(item)
        elif not isinstance(item, Module):
            arrays.extend(arrays_of(item))
        elif (array := first_array(item)) is not None:
            arrays.append(array)
    others = [array for array in arrays if type(array) is not np.ndarray and not is_of_numpy(array)]
    if not arrays:
        return None
    xp = array_namespace(*(others or arrays))
    is_mixed = 0 < len(others) < len(arrays) and xp.name not in ("numpy", "jax", "cupy")
    return None if is_mixed else xp
