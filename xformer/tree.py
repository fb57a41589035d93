"""Modules are frozen trees of named arrays.

A `Module` is immutable. Fields annotated `Array` are its leaves, fields that hold modules (or tuples, lists and dicts
of modules) are its branches, and every other field is static configuration. Training makes a new model,
`replace(model, arrays)`; gradients come back as a tree of the same structure. Tuples, lists and dicts of trees are
trees too, so batches and optimizer states need no wrapper.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self, dataclass_transform

from xformer.backends import (
    Array,
    Device,
    DType,
    Namespace,
    array_namespace,
    default_float,
    device,
    dtype_name,
    dtype_named,
    from_host,
    is_floating,
    resolve,
    to_host,
)
from xformer.errors import ConfigError, ShapeError

_ARRAY_ANNOTATIONS = {"Array", "Array | None"}
_BRANCHES = (tuple, list, dict)


@dataclass_transform(eq_default=False)
class Module:
    """Base of every layer and model: a frozen dataclass that is a tree of named arrays.

    A subclass lists its fields and sets each exactly once in `__init__`:

        class Linear(Module):
            weight: Array          # a leaf: annotated Array
            bias: Array | None     # a leaf, or absent
            features: int          # static: everything else
    """

    __array_fields__: frozenset[str] = frozenset()
    __fields__: tuple[str, ...] = ()

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        own_init = "__init__" not in cls.__dict__
        # Modules compare and hash by identity: comparing arrays is neither cheap nor a yes-or-no question.
        dataclasses.dataclass(init=own_init, repr=False, eq=False)(cls)
        fields = dataclasses.fields(cls)  # type: ignore[arg-type]
        cls.__fields__ = tuple(field.name for field in fields)
        cls.__array_fields__ = frozenset(field.name for field in fields if field.type in _ARRAY_ANNOTATIONS)

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self.__fields__:
            raise AttributeError(f"{type(self).__name__} has no field {name!r}; its fields are {self.__fields__}")
        if name in self.__dict__:
            raise AttributeError(f"{type(self).__name__}.{name} is frozen; use replace() to make a changed copy")
        self.__dict__.pop(_LAYOUT, None)
        if name not in self.__array_fields__ and is_array(value) and tuple(value.shape) != ():
            raise AttributeError(
                f"{type(self).__name__}.{name} is given an array; annotate it `{name}: Array`, in a file with "
                "`from __future__ import annotations`, to make it a parameter"
            )
        object.__setattr__(self, name, value)

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"{type(self).__name__} is frozen")

    def __repr__(self) -> str:
        parts = (f"{name}={_summary(getattr(self, name))}" for name in self.__fields__)
        return f"{type(self).__name__}({', '.join(parts)})"

    def named_parameters(self) -> Iterator[tuple[str, Array]]:
        """Yield (dotted name, array) in a fixed order: field order, then position in tuples and lists, or key."""
        return _named(self, "")

    def parameter_count(self) -> int:
        """Count the numbers in all arrays of the tree."""
        return sum(math.prod(array.shape) for _, array in self.named_parameters())

    def to(self, xp: Any = None, *, dtype: DType | str | None = None, device: Device = None) -> Self:
        """Return the module with its arrays in another library, floating dtype or device.

        Raises BackendError when the library, dtype or device is not there.
        """
        target = None if xp is None else resolve(xp)
        return map_arrays(lambda array: _move(array, target, dtype, device), self)  # type: ignore[no-any-return]


_NODES = (Module, *_BRANCHES)


def _summary(value: Any) -> str:
    """Show an array as dtype and shape, everything else as it is."""
    if isinstance(value, Module) or not (hasattr(value, "shape") and hasattr(value, "dtype")):
        return repr(value)
    return f"{dtype_name(value.dtype)}{list(value.shape)}"


def _move(array: Array, xp: Namespace, dtype: DType | str | None, place: Device) -> Array:
    """Move one array; a change of library goes through the host."""
    source = array_namespace(array)
    xp = source if xp is None else xp
    wanted = dtype_name(array.dtype)
    if is_floating(array.dtype) and (dtype is not None or xp is not source):
        wanted = dtype_name(default_float(xp, wanted if dtype is None else dtype))
    if xp is not source:
        # A copy, because libraries share memory with NumPy where they can, and optimizers write in place.
        return from_host(xp, to_host(array).copy(), dtype=wanted, device=place)
    if wanted != dtype_name(array.dtype):
        array = xp.astype(array, dtype_named(xp, wanted))
    if place is not None and place != device(array):
        array = from_host(xp, to_host(array), dtype=wanted, device=place)
    return array


# --- Flattening ---------------------------------------------------------------------------------------------------


def flatten(tree: Any) -> tuple[list[Array], Callable[[Sequence[Any]], Any]]:
    """Take a tree apart: its arrays in a fixed order, and a function that builds it again from others."""
    leaves: list[Array] = []
    _collect(tree, leaves)

    def rebuild(arrays: Sequence[Any]) -> Any:
        if len(arrays) != len(leaves):
            raise ShapeError(f"got {len(arrays)} arrays for a tree of {len(leaves)}; expected one for each leaf")
        if isinstance(tree, Module) and all(map(operator.is_, arrays, leaves)):
            return tree  # it is frozen, so no copy is needed; optimizers that write in place give the same arrays
        return _rebuild(tree, iter(arrays))

    return leaves, rebuild


def map_arrays(function: Callable[..., Any], tree: Any, *others: Any) -> Any:
    """Apply `function` to the arrays of one tree, or of several of the same structure, leaf by leaf."""
    leaves, rebuild = flatten(tree)
    columns = [flatten(other)[0] for other in others]
    for column in columns:
        if len(column) != len(leaves):
            raise ShapeError(f"trees differ: {len(leaves)} and {len(column)} arrays; expected the same structure")
    return rebuild([function(*row) for row in zip(leaves, *columns, strict=True)])


def is_array(value: Any) -> bool:
    """Tell whether a value is an array of any library, traced or not."""
    return hasattr(value, "shape") and hasattr(value, "dtype") and not isinstance(value, Module)


_LAYOUT = "_layout"  # where a module keeps the names of its leaves and branches: a training step asks many times


def _layout(node: Module) -> tuple[tuple[str, bool], ...]:
    """The names of the leaves (True) and branches (False) of one module, in field order."""
    known = node.__dict__.get(_LAYOUT)
    if known is None:
        values = ((name, name in node.__array_fields__, getattr(node, name)) for name in node.__fields__)
        known = tuple(
            (name, is_leaf)
            for name, is_leaf, value in values
            if (value is not None if is_leaf else isinstance(value, _NODES))
        )
        node.__dict__[_LAYOUT] = known
    return known


def _collect(node: Any, leaves: list[Array]) -> None:
    if isinstance(node, Module):
        for name, is_leaf in _layout(node):
            if is_leaf:
                leaves.append(getattr(node, name))
            else:
                _collect(getattr(node, name), leaves)
    elif isinstance(node, dict):
        for key in sorted(node):
            _collect(node[key], leaves)
    elif isinstance(node, tuple | list):
        for item in node:
            _collect(item, leaves)
    elif is_array(node):
        leaves.append(node)


def _rebuild(node: Any, arrays: Iterator[Any]) -> Any:
    if isinstance(node, Module):
        copy = object.__new__(type(node))
        fields = copy.__dict__  # a training step rebuilds several trees: __setattr__ would double the time
        fields.update(node.__dict__)
        for name, is_leaf in _layout(node):
            fields[name] = next(arrays) if is_leaf else _rebuild(getattr(node, name), arrays)
            if fields[name] is None:
                fields.pop(_LAYOUT, None)  # a leaf less, as optimizers have where they keep nothing
        return copy
    if isinstance(node, dict):
        rebuilt = {key: _rebuild(node[key], arrays) for key in sorted(node)}
        return {key: rebuilt[key] for key in node}
    if isinstance(node, tuple) and hasattr(node, "_fields"):
        return type(node)(*(_rebuild(item, arrays) for item in node))
    if isinstance(node, tuple | list):
        return type(node)(_rebuild(item, arrays) for item in node)
    return next(arrays) if is_array(node) else node


def _named(node: Any, prefix: str) -> Iterator[tuple[str, Array]]:
    if isinstance(node, Module):
        for name, is_leaf in _layout(node):
            if is_leaf:
                yield f"{prefix}{name}", getattr(node, name)
            else:
                yield from _named(getattr(node, name), f"{prefix}{name}.")
    elif isinstance(node, _BRANCHES):
        items = [(key, node[key]) for key in sorted(node)] if isinstance(node, dict) else enumerate(node)
        for key, item in items:
            if is_array(item):
                yield f"{prefix}{key}", item
            else:
                yield from _named(item, f"{prefix}{key}.")


def replace(module: Any, arrays: dict[str, Array]) -> Any:
    """Return the module with the named arrays exchanged for others of the same shapes.

    Raises ConfigError for a name the module does not have or lacks, ShapeError for another shape.
    """
    current = dict(module.named_parameters())
    unknown, missing = arrays.keys() - current.keys(), current.keys() - arrays.keys()
    if unknown or missing:
        raise ConfigError(
            f"parameter names differ: unknown {sorted(unknown)[:3]}, missing {sorted(missing)[:3]}; "
            f"expected the {len(current)} names of named_parameters()"
        )
    for name, array in current.items():
        if tuple(arrays[name].shape) != tuple(array.shape):
            raise ShapeError(f"{name} has shape {tuple(arrays[name].shape)}; expected {tuple(array.shape)}")
    return flatten(module)[1]([arrays[name] for name in current])
