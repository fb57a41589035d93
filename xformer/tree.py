"""Modules are frozen trees of named arrays.

A `Module` is immutable. Fields that hold arrays are its leaves, fields that hold modules (or tuples, lists and dicts of
modules) are its branches, and every other field is static configuration. Training makes a new model,
`replace(model, arrays)`; gradients come back as a tree of the same structure. Tuples, lists and dicts of trees are
trees too, so batches and optimizer states need no wrapper.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import operator
import re
import textwrap
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self, dataclass_transform

import numpy as np

from xformer.backends import (
    BACKENDS,
    Array,
    Backend,
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
from xformer.backends.backend import loaded_backends, on_load
from xformer.backends.namespaces import load_imported_backends
from xformer.errors import BackendError, ConfigError, ShapeError, nearest_hint
from xformer.html import Markup, details, tag

_BRANCHES = (tuple, list, dict)
_ARRAY_TYPE = re.compile(r"\b(Array|ndarray|NDArray|Tensor)\b")
_LAYOUT = "_layout"  # where a module caches the names of its leaves and branches: a training step needs them often
_CLASSES: weakref.WeakSet[type[Module]] = weakref.WeakSet()


@dataclass_transform(eq_default=False, field_specifiers=(dataclasses.field,))
class Module:
    """Base class of layers and models: a frozen dataclass that is a tree of named arrays.

    A subclass lists its fields and sets each exactly once in `__init__`:

        class Linear(Module):
            weight: Array          # a leaf
            bias: Array | None     # a leaf, or absent
            features: int          # static configuration

    A field that holds an array is a leaf, however it is annotated. Modules are pytrees of JAX and torch: `jax.jit`,
    `jax.grad` and `torch.utils._pytree` take them as arguments.
    """

    __array_fields__: frozenset[str] = frozenset()
    __fields__: tuple[str, ...] = ()

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        generate_init, inherited_fields = "__init__" not in cls.__dict__, cls.__fields__
        # Modules compare and hash by identity: comparing arrays is neither cheap nor a yes-or-no question.
        dataclasses.dataclass(init=generate_init, repr=False, eq=False)(cls)
        fields = dataclasses.fields(cls)  # type: ignore[arg-type]
        cls.__fields__ = tuple(field.name for field in fields)
        if generate_init and cls.__fields__ == inherited_fields:
            del cls.__init__  # a subclass without new fields inherits the constructor
        cls.__array_fields__ = frozenset(field.name for field in fields if _ARRAY_TYPE.search(str(field.type)))
        _CLASSES.add(cls)
        for backend in loaded_backends():
            _register_pytree(backend, cls)

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self.__fields__:
            raise AttributeError(
                f"{type(self).__name__} has no field {name!r}; annotate it in the class, as `{name}: ...`"
            )
        if name in self.__dict__:
            raise AttributeError(f"{type(self).__name__}.{name} is frozen; use replace() to make a changed copy")
        if not self.__dict__:
            load_imported_backends()  # so that the module is a pytree of JAX or torch before any operation runs
        self.__dict__.pop(_LAYOUT, None)
        object.__setattr__(self, name, value)

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"{type(self).__name__} is frozen")

    def __dir__(self) -> list[str]:
        return [name for name in super().__dir__() if name not in _TORCH_METHODS or hasattr(self, name)]

    def __repr__(self) -> str:
        return _format(self, depth=2)

    def _repr_html_(self) -> str:
        """Return the tree for notebooks: a block for each module, which a click opens."""
        return _format_html("", self, is_open=True)

    def named_parameters(self) -> Iterator[tuple[str, Array]]:
        """Yield (dotted name, array) in a fixed order: fields as declared, tuples by position, dicts by sorted key."""
        return _named(self, "")

    def parameter_count(self) -> int:
        """Return the number of elements in all arrays of the tree."""
        return sum(math.prod(array.shape) for _, array in self.named_parameters())

    def to(self, xp: Any = None, *, dtype: DType | str | None = None, device: Device = None) -> Self:
        """Return the module with its arrays in another library, floating dtype or device.

        Args:
            xp: Array library, as a module or by name; default the present one.
            dtype: Dtype of floating arrays; integers and booleans keep theirs.
            device: Device as the library names it.

        Raises:
            BackendError: If the library, dtype or device is not available.
        """
        if isinstance(xp, str) and xp not in BACKENDS:
            raise BackendError(
                f"backend {xp!r} is unknown; expected one of {', '.join(BACKENDS)}, or dtype=... or device=... by name"
            )
        target = None if xp is None else resolve(xp)
        return map_arrays(lambda array: _move(array, target, dtype, device), self)


# Methods of torch.nn.Module and of models of transformers, and what to use here.
_TORCH_METHODS = {
    "cuda": "use model.to(device=...) or model.to('cupy')",
    "eval": "dropout is off unless the call gets rng=",
    "from_pretrained": "use xformer.load_pretrained(directory)",
    "generate": "use xformer.generate(model, tokens)",
    "load_state_dict": "use xformer.tree.replace(model, arrays)",
    "parameters": "use model.named_parameters()",
    "save_pretrained": "use xformer.save_pretrained(model, directory)",
    "state_dict": "use dict(model.named_parameters())",
    "train": "dropout is on if the call gets rng=xformer.Rng(seed); to train, see xformer.fit",
    "zero_grad": "value_and_grad returns new gradients",
}


class _TorchMethod:
    """An attribute that is absent, also for hasattr, and whose error names the replacement."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, module: Any, cls: type) -> Any:
        hint = f"'{cls.__name__}' object has no attribute '{self.name}'; {_TORCH_METHODS[self.name]}"
        raise AttributeError(hint, name=self.name, obj=module)


for _name in _TORCH_METHODS:
    setattr(Module, _name, _TorchMethod(_name))


def _move(array: Array, xp: Namespace | None, dtype: DType | str | None, target: Device) -> Array:
    """Move one array; a change of library goes through the host."""
    source = array_namespace(array)
    xp = source if xp is None else xp
    name = dtype_name(array.dtype)
    if is_floating(array.dtype) and (dtype is not None or xp is not source):
        name = dtype_name(default_float(xp, name if dtype is None else dtype))
    if xp is not source:
        # A copy, because libraries share memory with NumPy where they can, and optimizers write in place.
        return from_host(xp, to_host(array).copy(), dtype=name, device=target)
    if name != dtype_name(array.dtype):
        array = xp.astype(array, dtype_named(xp, name))
    if target is not None and target != device(array):
        array = from_host(xp, to_host(array), dtype=name, device=target)
    return array


# --- Flattening ---------------------------------------------------------------------------------------------------


def flatten(tree: Any) -> tuple[list[Array], Callable[[Sequence[Any]], Any]]:
    """Split a tree into its arrays and its structure.

    Args:
        tree: A Module, an array, or tuples, lists and dicts of them. Other values belong to the structure.

    Returns:
        The arrays in a fixed order, and a function that builds the same tree from other arrays.
    """
    leaves: list[Array] = []
    _collect(tree, leaves)

    def rebuild(arrays: Sequence[Any]) -> Any:
        if len(arrays) != len(leaves):
            raise ShapeError(f"got {len(arrays)} arrays for a tree of {len(leaves)}; expected one for each leaf")
        if isinstance(tree, Module) and all(map(operator.is_, arrays, leaves)):
            return tree  # it is frozen, so no copy is needed; optimizers that write in place give the same arrays
        return _rebuild(tree, iter(arrays))

    return leaves, rebuild


def map_arrays(function: Callable[..., Any], tree: Any, *rest: Any) -> Any:
    """Apply `function` to the arrays of a tree, or to those of several trees of the same structure.

    Args:
        function: Takes one array of each tree and returns a leaf.
        tree: Tree that gives the result its structure.
        *rest: More trees with as many arrays.

    Raises:
        ShapeError: If the trees differ in their number of arrays.
    """
    leaves, rebuild = flatten(tree)
    columns = [flatten(other)[0] for other in rest]
    for column in columns:
        if len(column) != len(leaves):
            raise ShapeError(f"trees differ: {len(leaves)} and {len(column)} arrays; expected the same structure")
    return rebuild([function(*row) for row in zip(leaves, *columns, strict=True)])


def map_modules(function: Callable[[Any], Any], tree: Any) -> Any:
    """Apply `function` to all modules of a tree, and return the tree of the results.

    Args:
        function: Takes a module and returns a module; that of a field is replaced before the one it belongs to.
        tree: A Module, or tuples, lists and dicts of them.
    """
    if isinstance(tree, Module):
        fields = {name: getattr(tree, name) for name in tree.__fields__}
        branches = {name: map_modules(function, value) for name, value in fields.items() if _is_branch(value)}
        return function(with_fields(tree, **branches))
    if isinstance(tree, dict):
        return {key: map_modules(function, item) for key, item in tree.items()}
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(map_modules(function, item) for item in tree))
    if isinstance(tree, tuple | list):
        return type(tree)(map_modules(function, item) for item in tree)
    return tree


def with_fields(module: Any, **fields: Any) -> Any:
    """Return a copy of a module with other values of some fields, whatever its constructor takes.

    Args:
        module: A Module.
        **fields: New values.

    Raises:
        ConfigError: For a name that is not a field.
    """
    if unknown := fields.keys() - set(module.__fields__):
        name = min(unknown)
        raise ConfigError(f"{type(module).__name__} has no field {name!r}; {nearest_hint(name, module.__fields__)}")
    copy = object.__new__(type(module))
    copy.__dict__.update(module.__dict__ | fields)
    copy.__dict__.pop(_LAYOUT, None)
    return copy


def is_array(value: Any) -> bool:
    """Return whether a value is an array of any library, traced or not."""
    return not isinstance(value, Module) and hasattr(value, "shape") and hasattr(value, "dtype")


def _layout(node: Module) -> tuple[tuple[str, bool], ...]:
    """Return the names of the leaves (True) and branches (False) of one module, in field order."""
    layout = node.__dict__.get(_LAYOUT)
    if layout is None:
        fields = ((name, getattr(node, name)) for name in node.__fields__)
        roles = ((name, _is_leaf(node, name, value), _is_branch(value)) for name, value in fields)
        layout = tuple((name, is_leaf) for name, is_leaf, is_branch in roles if is_leaf or is_branch)
        node.__dict__[_LAYOUT] = layout
    return layout


def _is_leaf(node: Module, name: str, value: Any) -> bool:
    """Return whether a field holds an array. NumPy scalars are configuration unless they are annotated as arrays."""
    return is_array(value) and (name in node.__array_fields__ or not isinstance(value, np.generic))


def _is_branch(value: Any) -> bool:
    """Return whether a value is a module, or a container with arrays or modules in it."""
    if isinstance(value, _BRANCHES):
        items = value.values() if isinstance(value, dict) else value
        return any(is_array(item) or _is_branch(item) for item in items)
    return isinstance(value, Module)


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
                fields.pop(_LAYOUT, None)  # one leaf less
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
    """Return a copy of a module with other arrays of the same shapes.

    Args:
        module: A Module.
        arrays: All arrays by their names in `named_parameters()`.

    Raises:
        ConfigError: If a name is unknown or missing.
        ShapeError: If a shape differs.
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


# --- Pytrees of other libraries -----------------------------------------------------------------------------------


class _Static:
    """The static part of a module: its class, layout and configuration. Equal parts let jitted functions be reused."""

    def __init__(self, node: Module) -> None:
        self.layout = _layout(node)
        self.names = [name for name, _ in self.layout]  # of the children
        self.fields = {name: value for name, value in node.__dict__.items() if name not in (*self.names, _LAYOUT)}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Static) and self.layout == other.layout and self.fields == other.fields

    def __hash__(self) -> int:
        return hash((self.layout, tuple(self.fields)))  # not of the values: a list or a dict has no hash

    def __repr__(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self.fields.items())


def _register_pytree(backend: Backend, cls: type[Module]) -> None:
    def unflatten(static: _Static, children: Any) -> Module:
        node = object.__new__(cls)
        node.__dict__.update(static.fields, **dict(zip(static.names, children, strict=True)))
        if all(child is not None for child in children):
            node.__dict__[_LAYOUT] = static.layout
        return node

    backend.register_pytree(cls, _flatten_once, unflatten)


def _flatten_once(node: Module) -> tuple[tuple[Any, ...], _Static]:
    static = _Static(node)
    return tuple(getattr(node, name) for name in static.names), static


def _register_all(backend: Backend) -> None:
    for cls in _CLASSES:
        _register_pytree(backend, cls)


on_load(_register_all)


# --- repr ---------------------------------------------------------------------------------------------------------

_LINE = 88  # characters


def _format(value: Any, depth: int) -> str:
    """Show a tree on several indented lines, nested modules up to a depth, repeated ones once."""
    if isinstance(value, Module):
        if depth == 0:
            return f"{type(value).__name__}(...)"
        parts = [f"{name}={_format(getattr(value, name), depth - 1)}" for name in value.__fields__]
        return _enclose(f"{type(value).__name__}(", parts, ")")
    if is_array(value) and not isinstance(value, np.generic):
        return f"{dtype_name(value.dtype)}{list(value.shape)}"
    if isinstance(value, tuple | list) and _is_branch(value):
        runs = [(text, len(list(run))) for text, run in itertools.groupby(_format(item, depth) for item in value)]
        return _enclose("(", list(_numbered(runs)), ")")
    if isinstance(value, dict) and _is_branch(value):
        return _enclose("{", [f"{key!r}: {_format(item, depth)}" for key, item in value.items()], "}")
    text = repr(value)
    return text if len(text) <= _LINE // 2 else f"{type(value).__name__}(...)"


def _numbered(runs: list[tuple[str, int]]) -> Iterator[str]:
    """Label runs of equal texts as "(0-5): 6 x text"."""
    first = 0
    for text, count in runs:
        yield f"({first}): {text}" if count == 1 else f"({first}-{first + count - 1}): {count} x {text}"
        first += count


def _enclose(opening: str, parts: list[str], closing: str) -> str:
    line = f"{opening}{', '.join(parts)}{closing}"
    if len(line) <= _LINE and "\n" not in line:
        return line
    indented = textwrap.indent("".join(f"{part},\n" for part in parts), "  ")
    return f"{opening}\n{indented}{closing}"


def _format_html(label: str, node: Any, *, is_open: bool = False) -> Markup:
    """Show a tree as nested blocks with the arrays and settings of each module, repeated items once."""
    label = f"{label}: " if label else ""
    if is_array(node):
        return tag("div", f"{label}{dtype_name(node.dtype)}{list(node.shape)}")
    size = sum(math.prod(array.shape) for array in flatten(node)[0])
    name = type(node).__name__ if isinstance(node, Module) else f"{len(node)} items"
    contents: list[Markup] = []
    if isinstance(node, tuple | list):
        first = 0
        for _, run in itertools.groupby(node, key=lambda item: _format_html("", item)):
            items = list(run)
            last = first + len(items) - 1
            contents.append(_format_html(f"{first}" if last == first else f"{first} to {last}, each", items[0]))
            first = last + 1
    else:
        fields = node if isinstance(node, dict) else {field: getattr(node, field) for field in node.__fields__}
        for field, value in fields.items():
            if is_array(value) or _is_branch(value):
                contents.append(_format_html(str(field), value))
            elif value is not None:
                code = tag("code", f"{field}={value!r}")
                contents.append(tag("div", code) if len(code) <= 2 * _LINE else details(f"{field}: settings", code))
    return details(f"{label}{name}, {size:,} parameters", *contents, is_open=is_open)
