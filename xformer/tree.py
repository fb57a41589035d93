"""Modules are frozen trees of named arrays.

A `Module` is immutable. Fields that hold arrays are its leaves, fields that hold modules (or tuples and dicts of
modules) are its branches, and every other field is static configuration. Its floating arrays are its parameters:
training makes a new model from others, and gradients come back as a tree of the same structure. Integer, boolean and
frozen arrays stay as they are; their gradient is None. Tuples, lists and dicts of trees are trees too, so batches and
optimizer states need no wrapper.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import operator
import re
import sys
import textwrap
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from numbers import Real
from typing import Any, ClassVar, NamedTuple, Self, dataclass_transform

import numpy as np

from xformer import hints
from xformer.backends import Array, Device, DType, Library, Namespace, device, dtype_name, is_floating, to_host
from xformer.backends.array_types import T
from xformer.backends.library import array_namespace, load_imported, loaded_libraries, on_load, resolve
from xformer.errors import ConfigError, ShapeError, add_absent_methods, check_arguments, describe_type, nearest_hint
from xformer.html import Markup, details, tag

_SEQUENCES = (tuple, list)
_CONTAINERS = (tuple, list, dict)
_ARRAY_TYPE = re.compile(r"\b(Array|ndarray|NDArray|Tensor)\b")
_FROZEN = "_frozen"  # where a module has the names of its arrays that are not parameters
_LAYOUT = "_layout"  # where a module caches the names of its leaves and branches: a training step needs them often
_CLASSES: weakref.WeakSet[type[Module]] = weakref.WeakSet()
_UNDER_CONSTRUCTION: set[int] = set()  # ids of modules
_CONSTRUCTOR = "_constructor"  # where an `__init__` that is wrapped has itself: functools.wraps copies attributes


@dataclass_transform(eq_default=False, field_specifiers=(dataclasses.field,))
class Module:
    """Base class of layers and models: a frozen dataclass that is a tree of named arrays.

    A subclass lists its fields and sets them in `__init__`, after which the module is immutable:

        class Linear(Module):
            weight: Array          # a leaf
            bias: Array | None     # a leaf, or absent
            features: int          # static configuration

    Any field that holds an array is a leaf, whatever its annotation. After `__init__`, lists become tuples, and dicts
    become read-only. With `init=False` a subclass inherits the constructor. Modules are pytrees of JAX and torch:
    `jax.jit`, `jax.grad` and `torch.utils._pytree` take them as arguments.
    """

    __array_fields__: frozenset[str] = frozenset()
    __module_fields__: Mapping[str, type[Module]] = {}
    __fields__: tuple[str, ...] = ()
    __activations__: ClassVar[tuple[str, ...]] = ()  # names that a layer gives its activations, see xformer.record

    def __init_subclass__(cls, *, init: bool = True, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        generate_init, inherited_fields = init and "__init__" not in cls.__dict__, cls.__fields__
        # Modules compare and hash by identity: comparing arrays is neither cheap nor a yes-or-no question.
        dataclasses.dataclass(init=generate_init, repr=False, eq=False)(cls)
        fields = dataclasses.fields(cls)  # type: ignore[arg-type]
        cls.__fields__ = tuple(field.name for field in fields)
        if generate_init and cls.__fields__ == inherited_fields:
            del cls.__init__  # a subclass without new fields inherits the constructor
        if getattr(cls.__init__, _CONSTRUCTOR, object.__init__) is not cls.__init__:
            cls.__init__ = _constructor(check_arguments()(cls.__init__))  # type: ignore[method-assign]
        cls.__array_fields__ = frozenset(field.name for field in fields if _ARRAY_TYPE.search(str(field.type)))
        scope: Any = vars(sys.modules.get(cls.__module__, object))
        classes = {field.name: scope.get(field.type, field.type) for field in fields}
        cls.__module_fields__ = {
            name: each for name, each in classes.items() if isinstance(each, type) and issubclass(each, Module)
        }
        if "forward" in cls.__dict__ and not any("__call__" in each.__dict__ for each in cls.__mro__):
            raise ConfigError(f"{cls.__name__} defines forward; expected __call__")
        _CLASSES.add(cls)
        for library in loaded_libraries():
            _register_pytree(library, cls)

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self.__fields__:
            problem = f"{type(self).__name__} has no field {name!r}"
            raise AttributeError(f"{problem}; annotate it in the class, as `{name}: ...`")
        if id(self) not in _UNDER_CONSTRUCTION:
            hint = f"xf.tree.with_fields(module, {name}=...) returns a changed copy"
            raise AttributeError(f"{type(self).__name__}.{name} cannot be set; {hint}")
        if name in self.__module_fields__ and isinstance(value, Real | str):  # as in EncoderLayer(512, 8, 2048)
            expected = self.__module_fields__[name].__name__
            raise ConfigError(f"{type(self).__name__} got {name}={value!r}; expected an instance of {expected}")
        if not isinstance(value, Module) and not is_array(value) and hasattr(value, "state_dict"):
            received = f"{type(value).__module__}.{type(value).__name__}"
            problem = f"{type(self).__name__}.{name} is a {received}"
            raise ConfigError(f"{problem}; expected a layer of xformer, such as xf.Linear")
        object.__setattr__(self, name, value)

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"{type(self).__name__}.{name} cannot be deleted")

    def __repr__(self) -> str:
        return _format(self, depth=2)

    def _repr_html_(self) -> str:
        """Return the tree for notebooks: a block for each module, which a click opens."""
        return _format_html("", self, is_open=True)

    def named_arrays(self) -> Iterator[tuple[str, Array]]:
        """Yield (dotted name, array) in a fixed order: fields as declared, tuples by position, dicts by sorted key."""
        return ((name, x) for name, x in walk(self) if is_array(x))

    def named_parameters(self) -> Iterator[tuple[str, Array]]:
        """Yield the floating arrays of `named_arrays`, also frozen ones."""
        return ((name, array) for name, array in self.named_arrays() if is_floating(array.dtype))

    def named_trainable_parameters(self) -> Iterator[tuple[str, Array]]:
        """Yield the parameters that are not frozen: training changes them, and no others."""
        arrays = ((name, x) for name, x in walk(self, trainable_only=True) if is_array(x))
        return ((name, array) for name, array in arrays if is_floating(array.dtype))

    def named_modules(self, prefix: str = "") -> Iterator[tuple[str, Module]]:
        """Yield (dotted name, module) for each module that a call applies: itself, with the prefix, and those in it."""
        yield prefix, self
        pending = [(f"{prefix}.{name}" if prefix else name, x) for name, x in reversed(children_of(self))]
        while pending:
            name, item = pending.pop()
            if isinstance(item, Module):
                yield from item.named_modules(name)
            else:
                pending += [(f"{name}.{key}", x) for key, x in reversed(children_of(item))]

    def parameter_count(self) -> int:
        """Return the number of elements in all parameters of the tree, also in frozen ones."""
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
        target = None if xp is None else resolve(xp)
        return map_arrays(lambda array: _move(array, target, dtype, device), self)


def _constructor(function: Callable[..., None]) -> Callable[..., None]:
    """Wrap `__init__` so that the module becomes immutable when the outermost constructor returns."""

    @functools.wraps(function)
    def __init__(self: Module, *args: Any, **keywords: Any) -> None:
        if id(self) in _UNDER_CONSTRUCTION:
            function(self, *args, **keywords)
            return
        load_imported()  # so that the module is a pytree of JAX or torch before any operation runs
        _UNDER_CONSTRUCTION.add(id(self))
        try:
            function(self, *args, **keywords)
        finally:
            _UNDER_CONSTRUCTION.remove(id(self))
        fields = self.__dict__
        if missing := [name for name in self.__fields__ if name not in fields and not hasattr(type(self), name)]:
            raise ConfigError(f"{type(self).__name__}.__init__ does not set the field {missing[0]!r}")
        fields.update({name: _immutable(name, fields[name]) for name in self.__fields__ if name in fields})
        _layout(self)  # torch.compile traces a model again whose parts get new attributes

    setattr(__init__, _CONSTRUCTOR, __init__)
    return __init__


add_absent_methods(Module, hints.MODULES)


def _move(array: Array, xp: Namespace | None, dtype: DType | str | None, target: Device) -> Array:
    """Move one array; a change of library goes through the host, but from a GPU to CuPy."""
    source = array_namespace(array)
    xp = source if xp is None else xp
    name = dtype_name(array.dtype)
    if is_floating(array.dtype) and (dtype is not None or xp is not source):
        name = dtype_name(xp.default_float(name if dtype is None else dtype))
    if xp is not source and (copy := xp.library.copy_from_gpu(array)) is not None:
        array = copy
    elif xp is not source:
        # A copy, because libraries share memory with NumPy where they can, and optimizers write in place.
        return xp.from_host(to_host(array).copy(), dtype=name, device=target)
    if name != dtype_name(array.dtype):
        array = xp.astype(array, xp.dtype_named(name))
    if target is not None and target != device(array):
        array = xp.from_host(to_host(array), dtype=name, device=target)
    return array


# --- Flattening ---------------------------------------------------------------------------------------------------

# What a node of a tree is: an array, a Module (with its layout), a dict, a tuple or list, or a value of the structure.
_LEAF, _MODULE, _DICT, _SEQUENCE, _VALUE, _CONSTANT = range(6)  # a constant is an array that is not a parameter
_IS_FLOATING: dict[type, dict[Any, bool]] = {}  # by class, as dtypes._NAMES


class _Constant:
    """A frozen array."""

    def __init__(self, array: Array) -> None:
        self.array = array


def _as_constants(value: Any) -> Any:
    """Return the value of a frozen field with its arrays, but not those of modules in it, as constants."""
    return _Constant(value) if is_array(value) else map_items(_as_constants, value)


def map_items(function: Callable[[Any], Any], value: Any) -> Any:
    """Apply a function to the items of a tuple, list or dict; return any other value as it is."""
    if isinstance(value, dict):
        return type(value)({key: function(item) for key, item in value.items()})
    return rebuild_sequence(value, map(function, value)) if isinstance(value, _SEQUENCES) else value


def rebuild_sequence(value: Any, items: Iterable[Any]) -> Any:
    """Return a tuple, named tuple or list of the class of `value`."""
    return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)


def items_of(value: Any) -> Iterator[Any]:
    """Yield the items of nested tuples, lists and dicts, or any other value itself."""
    if isinstance(value, _CONTAINERS):
        for item in value.values() if isinstance(value, dict) else value:
            yield from items_of(item)
    else:
        yield value


def children_of(node: Any) -> list[tuple[Any, Any]]:
    """Return the names and values of what a tree consists of: fields as declared, positions, or sorted keys."""
    if isinstance(node, Module):
        return [(name, getattr(node, name)) for name in _layout(node).names]
    if isinstance(node, dict):
        return [(key, node[key]) for key in _sorted_keys(node)]
    return list(enumerate(node)) if isinstance(node, _SEQUENCES) else []


def walk(tree: Any, name: str = "", *, trainable_only: bool = False) -> Iterator[tuple[str, Any]]:
    """Yield (dotted name, node) for a tree and all that it contains, parents before children.

    Args:
        tree: A Module, an array, or tuples, lists and dicts of them.
        name: Name of the tree.
        trainable_only: Leave out frozen arrays.
    """
    yield name, tree
    frozen = tree.__dict__.get(_FROZEN, ()) if trainable_only and isinstance(tree, Module) else ()
    for key, child in children_of(tree):
        child = _as_constants(child) if key in frozen else child
        yield from walk(child, f"{name}.{key}" if name else str(key), trainable_only=trainable_only)


def first_array(tree: Any) -> Any:
    """Return the first array of a tree, or None."""
    if is_array(tree):
        return tree
    return next((array for _, child in children_of(tree) if (array := first_array(child)) is not None), None)


def flatten(
    tree: Any, *, parameters_only: bool = False, frozen: list[int] | None = None
) -> tuple[list[Array], Callable[..., Any]]:
    """Split a tree into its arrays and its structure.

    Args:
        tree: A Module, an array, or tuples, lists and dicts of them. Other values belong to the structure.
        parameters_only: Return the trainable parameters only. All other arrays then belong to the structure.
        frozen: List that gets the positions of the frozen arrays.

    Returns:
        The arrays in a fixed order, and a function that builds the same tree from other arrays. With
        `rebuild(arrays, keep=False)` numbers and arrays that are not parameters become None, as in gradients.

    Raises:
        ConfigError: If the keys of a dict cannot be sorted.
    """
    # Loops instead of recursion and small functions: a training step flattens and rebuilds several trees.
    leaves: list[Array] = []
    nodes: list[tuple[int, Any]] = []  # parents before children
    pending = [tree]
    while pending:
        node = pending.pop()
        if isinstance(node, Module):
            layout = node.__dict__.get(_LAYOUT) or _layout(node)
            nodes.append((_MODULE, layout))
            constants = layout.fields.get(_FROZEN, ()) if parameters_only or frozen is not None else ()
            for name in reversed(layout.names):
                child = getattr(node, name)
                pending.append(_as_constants(child) if name in constants else child)
        elif isinstance(node, dict):
            nodes.append((_DICT, node))
            for key in reversed(_sorted_keys(node)):
                pending.append(node[key])
        elif isinstance(node, _SEQUENCES):
            nodes.append((_SEQUENCE, node))
            pending.extend(reversed(node))
        elif hasattr(node, "shape") and hasattr(node, "dtype") and not isinstance(node, type):
            if parameters_only:
                dtype = node.dtype
                known = _IS_FLOATING.get(type(dtype))
                is_parameter = known.get(dtype) if known else None
                if is_parameter is None:
                    # Complex arrays, too, so that derivatives refuse them.
                    is_parameter = is_floating(dtype) or "complex" in dtype_name(dtype)
                    _IS_FLOATING.setdefault(type(dtype), {})[dtype] = is_parameter
                if not is_parameter:
                    nodes.append((_CONSTANT, node))
                    continue
            leaves.append(node)
            nodes.append((_LEAF, None))
        elif isinstance(node, _Constant) and frozen is not None:
            frozen.append(len(leaves))
            leaves.append(node.array)
            nodes.append((_LEAF, None))
        elif isinstance(node, _Constant):
            nodes.append((_CONSTANT, node.array))
        else:
            nodes.append((_VALUE, node))

    def rebuild(arrays: Sequence[Any], *, keep: bool = True) -> Any:
        if len(arrays) != len(leaves):
            raise ShapeError(f"got {len(arrays)} arrays for a tree of {len(leaves)}; expected one for each leaf")
        if keep and isinstance(tree, Module) and all(map(operator.is_, arrays, leaves)):
            return tree  # it is immutable, so no copy is needed; optimizers that write in place give the same arrays
        remaining = list(arrays)
        built: list[Any] = []
        for kind, value in reversed(nodes):
            if kind == _LEAF:
                value = remaining.pop()
            elif kind == _MODULE:
                layout, value = value, object.__new__(value.cls)
                fields = value.__dict__  # __setattr__ would double the time
                fields.update(layout.fields)
                fields[_LAYOUT] = layout
                for name in layout.names:
                    child = fields[name] = built.pop()
                    if isinstance(child, np.generic):  # NumPy makes them of arrays without axes
                        fields[name] = np.asarray(child)
                    elif child is None:
                        fields.pop(_LAYOUT, None)  # one leaf less
            elif kind == _DICT:
                items = {key: built.pop() for key in _sorted_keys(value)}
                items = {key: items[key] for key in value}
                value = FrozenDict(items) if isinstance(value, FrozenDict) else items
            elif kind == _SEQUENCE:
                count = len(value)
                children = built[: -count - 1 : -1] if count else []
                del built[len(built) - count :]
                value = rebuild_sequence(value, children)
            elif not keep and (kind == _CONSTANT or isinstance(value, int | float | complex)):
                value = None
            built.append(value)
        return built[0]

    return leaves, rebuild


def flatten_parameters(tree: Any) -> tuple[list[Array], Callable[..., Any]]:
    """Split a tree into its trainable parameters, which are its floating arrays that are not frozen, and the rest."""
    return flatten(tree, parameters_only=True)


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
    columns = [leaves]
    for other in rest:
        columns.append(flatten(other)[0])
    check_same_count(*columns)
    return rebuild(list(map(function, *columns)))


def map_parameters(function: Callable[[Array], Any], tree: Any) -> Any:
    """Apply `function` to the trainable parameters of a tree; all other arrays become None."""
    leaves, rebuild = flatten_parameters(tree)
    return rebuild(list(map(function, leaves)), keep=False)


def check_same_count(leaves: Sequence[Any], *columns: Sequence[Any]) -> None:
    """Raise ShapeError unless several trees have the same number of arrays."""
    for column in columns:
        if len(column) != len(leaves):
            raise ShapeError(f"trees differ: {len(leaves)} and {len(column)} arrays; expected the same structure")


def map_modules(function: Callable[[Any], Any], tree: T) -> T:
    """Apply `function` to all modules of a tree, and return the tree of the results.

    Args:
        function: Takes a module and returns a module. Children are visited before parents.
        tree: A Module, or tuples, lists and dicts of them.
    """
    return map_named_modules(lambda name, module: function(module), tree)


def map_named_modules(function: Callable[[str, Any], Any], tree: Any, prefix: str = "") -> Any:
    """Apply `function` to the dotted names of all modules and the modules; see `map_modules`."""
    changed = {
        key: map_named_modules(function, item, f"{prefix}.{key}" if prefix else str(key))
        for key, item in (tree.items() if isinstance(tree, dict) else children_of(tree))
        if not is_array(item) or not isinstance(tree, Module)
    }
    if isinstance(tree, Module):
        return function(prefix, with_fields(tree, **changed))
    if isinstance(tree, dict):
        return changed
    return rebuild_sequence(tree, changed.values()) if isinstance(tree, _SEQUENCES) else tree


def with_fields(module: T, **fields: Any) -> T:
    """Return a copy of a module with some fields replaced, bypassing the constructor.

    Args:
        module: A Module.
        **fields: New values.

    Raises:
        ConfigError: For a name that is not a field.
    """
    _check_fields(module, fields)
    for name, value in fields.items():
        if is_array(getattr(module, name, None)) and isinstance(value, list | tuple | str):
            raise ConfigError(f"{name} is {describe_type(value)}; expected an array, or None")
    copy = object.__new__(type(module))
    copy.__dict__.update(module.__dict__ | {name: _immutable(name, value) for name, value in fields.items()})
    copy.__dict__.pop(_LAYOUT, None)
    return copy


def _check_fields(module: Module, names: Iterable[str]) -> None:
    for name in names:
        if not isinstance(name, str):
            raise ConfigError(f"a field is {name!r}; expected a name")
        if name not in module.__fields__:
            raise ConfigError(f"{type(module).__name__} has no field {name!r}; {nearest_hint(name, module.__fields__)}")


def freeze(tree: T, *names: str) -> T:
    """Return a copy of a tree in which all arrays, or those of some fields, are not trained.

        model = xf.freeze(model, "embedding")

    They have no gradient and no optimizer state, and `named_trainable_parameters` leaves them out.

    Args:
        tree: A Module, or tuples, lists and dicts of them.
        names: Names of the fields of a Module to freeze. Default: all.

    Raises:
        ConfigError: If it has no Module, or a field does not exist or has no arrays.
    """
    if not _has_modules(tree) or (names and not isinstance(tree, Module)):
        expected = "a Module" if names else "a Module, or a container of Modules"
        raise ConfigError(f"freeze got {describe_type(tree)}; expected {expected}")
    if names:
        _check_fields(tree, names)
        if without := [name for name in names if not flatten(getattr(tree, name))[0]]:
            raise ConfigError(f"{type(tree).__name__}.{without[0]} has no arrays to freeze")
        parts = {name: freeze(getattr(tree, name)) for name in names if _has_modules(getattr(tree, name))}
        arrays = {name for name in names if not isinstance(getattr(tree, name), Module)}
        return with_frozen(with_fields(tree, **parts), tree.__dict__.get(_FROZEN, frozenset()) | arrays)
    return map_modules(lambda module: with_frozen(module, frozenset(module.__fields__)), tree)


def unfreeze(tree: T) -> T:
    """Return a tree whose floating arrays are all parameters again; see `freeze`."""
    return map_modules(lambda module: with_frozen(module, frozenset()), tree)


def _has_modules(tree: Any) -> bool:
    return any(isinstance(item, Module) for item in items_of(tree))


def is_frozen(module: Module) -> bool:
    """Return whether arrays of a module itself, not of modules in it, are frozen."""
    return _FROZEN in module.__dict__


def with_frozen(module: T, names: frozenset[str]) -> T:
    """Return a copy of a module in which the arrays of these fields are frozen, and no others."""
    copy = with_fields(module)
    copy.__dict__.pop(_FROZEN, None)
    if names:
        copy.__dict__[_FROZEN] = names
    return copy


def is_array(value: Any) -> bool:
    """Return whether a value is an array of any library, traced or not."""
    return hasattr(value, "shape") and hasattr(value, "dtype") and not isinstance(value, Module | type)


def check_array(x: Any, name: str, *axes: str | int) -> tuple[int, ...]:
    """Return the shape of an array, and raise ShapeError for anything else.

    Args:
        x: An argument of a layer.
        name: Its name.
        *axes: Sizes of the axes, or names of those of any size; by default it may have any shape.
    """
    if not is_array(x):
        raise ShapeError(f"{name} is {describe_type(x)}; expected an array, e.g. xp.asarray(...)")
    shape = tuple(x.shape)
    fits = len(axes) in (0, len(shape))  # which torch.compile can trace for dynamic sizes, too
    for size, axis in zip(shape, axes, strict=False):  # a loop, as every layer checks its arguments
        fits = fits and (size == axis or isinstance(axis, str))
    if not fits:
        raise ShapeError(f"{name} has shape {shape}; expected ({', '.join(map(str, axes))})")
    return shape


def wrong_array(x: Array, subject: str, expected: str) -> ShapeError:
    """Return the error for an array of another shape or dtype; the subject has its verb, as in "images have"."""
    return ShapeError(f"{subject} shape {tuple(x.shape)} and dtype {dtype_name(x.dtype)}; expected {expected}")


class FrozenDict(dict[Any, Any]):
    """A read-only dict: every dict that is assigned to a field of a module becomes one."""

    def _refuse(self, *args: Any, **keywords: Any) -> Any:
        raise TypeError("a dict in a module is read-only; use tree.with_fields(module, name=new_dict) to make a copy")

    __setitem__ = __delitem__ = __ior__ = clear = pop = popitem = setdefault = update = _refuse

    def __reduce__(self) -> tuple[Any, ...]:
        return FrozenDict, (dict(self),)


def _immutable(name: str, value: Any) -> Any:
    """Return the value of a field with tuples in place of lists, and read-only dicts."""
    if isinstance(value, dict):
        keys = list(value)
        if _is_branch(value):
            if wrong := [key for key in keys if not isinstance(key, str) or "." in key]:
                raise ConfigError(f"{name} has the key {wrong[0]!r}; expected strings without '.' as names of arrays")
            keys.sort()  # as named_arrays() does
        return FrozenDict({key: _immutable(name, value[key]) for key in keys})
    value = tuple(value) if type(value) is list else value
    is_tuple = type(value) is tuple or (isinstance(value, tuple) and hasattr(value, "_fields"))
    return map_items(functools.partial(_immutable, name), value) if is_tuple else value


def _sorted_keys(node: dict[Any, Any]) -> list[Any]:
    try:
        return sorted(node)
    except TypeError as error:
        types = ", ".join(sorted({type(key).__name__ for key in node}))
        raise ConfigError(f"a dict of arrays has keys of types {types}; expected strings") from error


class _Layout:
    """The names of a module's children, which are arrays and branches, and its static part.

    Equal layouts let functions jitted by JAX be reused.
    """

    def __init__(self, node: Module) -> None:
        fields = {name: getattr(node, name) for name in node.__fields__}
        self.cls = type(node)
        self.names = tuple(name for name, x in fields.items() if _is_leaf(node, name, x) or _is_branch(x))
        self.fields = {name: x for name, x in node.__dict__.items() if name not in (*self.names, _LAYOUT)}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Layout) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash((self.names, tuple(self.fields)))  # not of the values: a dict has no hash

    def __repr__(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self.fields.items())


def _layout(node: Module) -> _Layout:
    layout: _Layout | None = node.__dict__.get(_LAYOUT)
    if layout is None:
        layout = _Layout(node)
        if id(node) not in _UNDER_CONSTRUCTION:
            node.__dict__[_LAYOUT] = layout
    return layout


def _is_leaf(node: Module, name: str, value: Any) -> bool:
    """Return whether a field holds an array. NumPy scalars are configuration unless they are annotated as arrays."""
    return is_array(value) and (name in node.__array_fields__ or not isinstance(value, np.generic))


def _is_branch(value: Any) -> bool:
    """Return whether a value is a module, or a container with arrays or modules in it."""
    is_container = isinstance(value, _CONTAINERS)
    return any(isinstance(item, Module) or (is_container and is_array(item)) for item in items_of(value))


def replace(module: T, arrays: dict[str, Array]) -> T:
    """Return a copy of a module with other arrays of the same shapes.

    Args:
        module: A Module.
        arrays: All arrays by their names in `named_arrays()`.

    Raises:
        ConfigError: If a name is unknown or missing.
        ShapeError: If a shape differs.
    """
    current = dict(module.named_arrays())
    unknown, missing = arrays.keys() - current.keys(), current.keys() - arrays.keys()
    if unknown or missing:
        raise ConfigError(
            f"array names differ: unknown {sorted(unknown)[:3]}, missing {sorted(missing)[:3]}; expected the "
            f"{len(current)} names of named_arrays(), as in {{**dict(module.named_arrays()), name: array}}"
        )
    for name, array in current.items():
        if tuple(arrays[name].shape) != tuple(array.shape):
            raise ShapeError(f"{name} has shape {tuple(arrays[name].shape)}; expected {tuple(array.shape)}")
    return flatten(module)[1]([arrays[name] for name in current])


# --- Pytrees of other libraries -----------------------------------------------------------------------------------


class _Keys(NamedTuple):
    """The static part of a `FrozenDict`."""

    names: tuple[str, ...]


def _register_pytree(library: Library, cls: type[Module]) -> None:
    def unflatten(layout: _Layout, children: Any) -> Module:
        node = object.__new__(cls)
        node.__dict__.update(layout.fields, **dict(zip(layout.names, children, strict=True)))
        if all(child is not None for child in children):
            node.__dict__[_LAYOUT] = layout
        return node

    library.register_pytree(cls, _flatten_once, unflatten)


def _flatten_once(node: Module) -> tuple[tuple[Any, ...], _Layout]:
    layout = _layout(node)
    return tuple(getattr(node, name) for name in layout.names), layout


def _register_all(library: Library) -> None:
    def flatten_dict(node: FrozenDict) -> tuple[tuple[Any, ...], _Keys]:
        keys = _Keys(tuple(_sorted_keys(node)))
        return tuple(node[key] for key in keys.names), keys

    library.register_pytree(
        FrozenDict, flatten_dict, lambda keys, children: FrozenDict(zip(keys.names, children, strict=True))
    )
    for cls in _CLASSES:
        _register_pytree(library, cls)


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
        runs = _runs(value, lambda item: _format(item, depth))
        parts = [f"({i}): {text}" if n == 1 else f"({i}-{i + n - 1}): {n} x {text}" for i, n, text in runs]
        return _enclose("(", parts, ")")
    if isinstance(value, dict) and _is_branch(value):
        return _enclose("{", [f"{key!r}: {_format(item, depth)}" for key, item in value.items()], "}")
    text = repr(value)
    return text if len(text) <= _LINE // 2 else f"{type(value).__name__}(...)"


def _runs(items: Sequence[Any], function: Callable[[Any], str]) -> Iterator[tuple[int, int, str]]:
    """Yield the first index, the length and the text of each run of items of which a function has the same text."""
    first = 0
    for text, run in itertools.groupby(map(function, items)):
        count = len(list(run))
        yield first, count, text
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
        for i, count, _ in _runs(node, lambda item: _format_html("", item)):
            contents.append(_format_html(f"{i}" if count == 1 else f"{i} to {i + count - 1}, each", node[i]))
    else:
        fields = node if isinstance(node, dict) else {field: getattr(node, field) for field in node.__fields__}
        for field, value in fields.items():
            if is_array(value) or _is_branch(value):
                contents.append(_format_html(str(field), value))
            elif value is not None:
                code = tag("code", f"{field}={value!r}")
                contents.append(tag("div", code) if len(code) <= 2 * _LINE else details(f"{field}: settings", code))
    return details(f"{label}{name}, {size:,} parameters", *contents, is_open=is_open)
