"""Named activations: `record` returns those of a model, `intervene` changes them.

A layer names an activation in one line, `x = named(self, "hidden", x)`, and lists the names in `__activations__`.
Outside of blocks of `record` and `intervene`, `named` returns its argument. In the trace of a program it appends a call
to the graph, in which each run passes the activation to the block that is open then.
"""

from __future__ import annotations

import contextlib
import difflib
import re
import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from functools import partial, reduce
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from xformer.backends import Array, array_namespace, device, dtype_name
from xformer.backends.array_types import T
from xformer.errors import BackendError, ConfigError, ShapeError, describe_type
from xformer.threads import Collector
from xformer.tracing.graph import ACTIVE_GRAPH
from xformer.tracing.namespace import innermost_trace
from xformer.tracing.tracer import Batch, Tracer
from xformer.tree import Module, is_array

_BLOCKS: Collector[_Block] = Collector("activation_blocks")
OPEN_BLOCKS = _BLOCKS.blocks
"""One item for each open block of any thread: while it is empty, there is nothing to do."""

_ORIGINALS: WeakKeyDictionary[Module, Module] = WeakKeyDictionary()  # of copies with the arrays of a program's trace


class Activations(dict[str, Any]):
    """Recorded activations by name, in the order in which the model computed them."""

    def __missing__(self, name: str) -> Any:
        if not self:
            raise KeyError(f"{name!r} was not recorded: the model was not called inside the block")
        raise KeyError(f"{name!r} was not recorded; {_hint(str(name), list(self))}")


@contextlib.contextmanager
def record(model: Module, names: str | Iterable[str] = "*", *, every_call: bool = False) -> Iterator[Activations]:
    """Record activations of a model by name while the block runs.

    The block records calls of this model, not of other models or copies, in its own thread and in parallel loops. In a
    function that is differentiated or compiled, it also records traced models of the same class and configuration, as
    `value_and_grad` makes them. While a block is open, generation on NumPy runs as compiled programs that call it,
    functions of `xf.jit` run their Python code, and layers whose attention scores or weights are recorded compute them
    explicitly. With `jax.jit`, open the block inside the function
    and return the arrays; around the function, it records nothing, or JAX reports leaked tracers.

    Activations recorded by a block inside a differentiated function can be differentiated; a block around
    `value_and_grad` records plain arrays.

    Args:
        model: Model, or a layer. The names of activations then start at this layer.
        names: Names of activations, or patterns such as "layers.*.residual_out", in which `*` stands for any
            characters; see `activation_names`. By default all.
        every_call: If true, record a list of the arrays of all calls, such as the steps of `generate`, instead of the
            array of the last call.

    Yields:
        A dict of activations by name, empty until the model is called. Interventions are applied before recording.

    Raises:
        ConfigError: If `model` has no activations, or none that match a name; and when it is called, if it contains
            a model twice, or if it is traced and contains models of equal configurations.

    Examples:
        >>> import xformer as xf
        >>> config = xf.LanguageModelConfig(vocab_size=13, d_model=8, num_heads=2, d_ff=16, num_layers=3)
        >>> model = xf.LanguageModel(config)
        >>> with record(model, "layers.*.self_attention.weights") as activations:
        ...     logits = model([[5, 4, 7]])
        >>> activations["layers.0.self_attention.weights"].shape  # (batch, heads, queries, keys)
        (1, 2, 3, 3)
    """
    block = _Recording("record", model, names, every_call)
    with block.open():
        yield block.activations


@contextlib.contextmanager
def intervene(model: Module, interventions: Mapping[str, Any]) -> Iterator[None]:
    """Change activations of a model while the block runs.

    It affects the calls that `record` records. If several blocks change an activation, the outermost is applied first.

    Args:
        model: Model, or a layer.
        interventions: Dict of changes by name or pattern, as for `record`. A change is an array that replaces the
            activation, or a function that takes the activation and returns a new one of the same shape and dtype. The
            function gets a copy that it may write into.

    Raises:
        ConfigError: If `model` has no activations, or none that match a name, if a value is neither a function nor an
            array, and at the end of a block that changed nothing.
        ShapeError: When the model is called, if the new activation has another shape or dtype, or is not an array.
        BackendError: When the model is called, if the new activation is an array of another library or device.

    Examples:
        >>> import xformer as xf
        >>> config = xf.LanguageModelConfig(vocab_size=13, d_model=8, num_heads=2, d_ff=16, num_layers=3)
        >>> model = xf.LanguageModel(config)
        >>> with intervene(model, {"layers.0.feed_forward.output": lambda x: 0 * x}):
        ...     logits = model([[5, 4, 7]])
    """
    if not isinstance(interventions, Mapping) or not interventions:
        received = "an empty dict" if isinstance(interventions, dict) else describe_type(interventions)
        raise ConfigError(f"interventions is {received}; expected a dict such as {{name: function}}")
    for name, value in interventions.items():
        if not is_array(value) and not callable(value):
            raise ConfigError(f"the intervention at {name!r} is {value!r:.60}; expected a function or an array")
    block = _Intervention("intervene", model, interventions)
    with block.open():
        yield
    if not block.has_changed:
        raise ConfigError(
            "the interventions were not applied; expected a call of the model in the block and in its thread, not in "
            "a function that was compiled before"
        )


def activation_names(model: Module) -> list[str]:
    """Return the names of the activations of a model, as `record` and `intervene` take them.

    Args:
        model: Model, or a layer.

    Raises:
        ConfigError: If `model` has no activations.

    Examples:
        >>> import xformer as xf
        >>> activation_names(xf.FeedForward(4, 8, init=0))
        ['hidden', 'output']
    """
    return _names_of(model, "activation_names")


def named(module: Module, name: str, x: T) -> T:
    """Return an activation of a layer: `x`, unless an open block changes it.

    Args:
        module: The layer.
        name: One of the names in `__activations__` of its class.
        x: The activation.
    """
    if OPEN_BLOCKS:
        for observe in _observers(module, name):
            x = observe(x)
    return x


def observers(module: Module, *names: str) -> dict[str, Callable[[Array], Array]]:
    """Return functions of those activations of the last call of a layer that an open block sees, by name.

    Each returns the activation to use. Programs may call them in later runs.
    """
    found = {name: [*_observers(module, name)] for name in names} if OPEN_BLOCKS else {}
    return {name: partial(reduce, lambda x, observe: observe(x), each) for name, each in found.items() if each}


def _observers(module: Module, name: str) -> Iterator[Callable[[Any], Any]]:
    module = _ORIGINALS.get(module, module)
    for index, block in enumerate(_BLOCKS.items() or ()):
        full_name = block.select(module, name)
        if full_name is not None:
            yield partial(_see, index, full_name)


def _see(index: int, name: str, x: Any) -> Array:
    """Return an activation, or a new one in its place, from a block of this thread."""
    block, graph = (_BLOCKS.items() or ())[index], ACTIVE_GRAPH.get()
    if graph is None or graph is block.graph:
        return block.apply(name, x)

    def run(x: Array) -> Array:
        return (_BLOCKS.items() or ())[index].apply(name, np.array(x))  # the program overwrites x

    if not block.is_last:
        return graph.call_on_host(lambda x: np.array(run(x)), x)
    graph.pass_later(run, x)  # blocks are called as rarely as possible
    return x


def call_on_host(function: Callable[..., Any], module: Module, *args: Any) -> Any:
    """Call a function of a layer and arrays; in a program for blocks outside of it, with plain ones in each run."""
    graph = ACTIVE_GRAPH.get()
    if graph is None or any(block.graph is graph for block in _BLOCKS.items() or ()):
        return function(module, *args)
    return graph.call_on_host(partial(function, _ORIGINALS.get(module, module)), *args)


def open_blocks() -> Hashable:
    """Return a value that is equal for blocks in this thread that programs need not tell apart."""
    return tuple(block.key for block in _BLOCKS.items() or ()) if OPEN_BLOCKS else ()


def note_copy(module: Module, copied: Module) -> None:
    """Let blocks see a copy of a module, whose arrays are traced, as the module."""
    if OPEN_BLOCKS:
        for (_, original), (_, each) in zip(module.named_modules(), copied.named_modules(), strict=True):
            _ORIGINALS[each] = original


def is_observing() -> bool:
    """Return whether a block is open in this thread."""
    return bool(OPEN_BLOCKS and _BLOCKS.items())


class _Block:
    """A block of `record` or `intervene`.

    Args:
        function: Name of the function, for errors.
        model: Its argument.
        patterns: Names and patterns of activations.
    """

    is_last = False  # whether other blocks see an activation first

    def __init__(self, function: str, model: Module, patterns: str | Iterable[str]) -> None:
        known = _names_of(model, function)
        # A traced copy of a model is found by its configuration, also of one inside `model`.
        self._models = [(name, x) for name, x in model.named_modules() if x is model or hasattr(x, "config")]
        self._matches = {pattern: _matching(pattern, known, model) for pattern in _as_patterns(patterns)}
        self._selected = {name for names in self._matches.values() for name in names}
        self._model, self._of_thread = model, threading.local()
        self.key = type(self), id(model), frozenset(self._selected)
        self.graph = ACTIVE_GRAPH.get()  # of the function that opens the block

    def open(self) -> contextlib.AbstractContextManager[Any]:
        """See the activations of calls while the block that is returned runs."""
        return _BLOCKS.collect(sorted((*(_BLOCKS.items() or ()), self), key=lambda block: block.is_last))

    def select(self, module: Module, name: str) -> str | None:
        """Return the full name of an activation that a layer is about to give, if the block sees it."""
        prefixes = [prefix for prefix, each in self._models if module is each or _is_traced_copy(module, each)]
        if len(prefixes) > 1:
            problem = f"a called {type(module).__name__} may be {' or '.join(map(repr, prefixes))} of the model"
            hint = "pass one of them to the block, or open it in the function that is differentiated or compiled"
            raise ConfigError(f"{problem}; {hint}")
        for prefix in prefixes:
            self._enter(module, prefix)
        names = self._layers.get(module)
        if names is None:  # a layer outside the model
            return None
        if name == module.__activations__[0]:  # a call begins
            names.rotate(-1)
        full_name = _joined(names[0], name)
        return full_name if full_name in self._selected else None

    def apply(self, name: str, x: Array) -> Array:
        """Return an activation, or a new one in its place."""
        raise NotImplementedError

    @property
    def _layers(self) -> WeakKeyDictionary[Module, deque[str]]:
        """Names of each layer, several if it is applied several times: first that of its last call in this thread."""
        if not hasattr(self._of_thread, "layers"):
            self._of_thread.layers = WeakKeyDictionary()
            self._enter(self._model, "")
        layers: WeakKeyDictionary[Module, deque[str]] = self._of_thread.layers
        return layers

    def _enter(self, model: Module, prefix: str) -> None:
        """Note the names of the layers of a model, and that none of them has been called."""
        layers: dict[Module, deque[str]] = {}
        for name, module in model.named_modules(prefix):
            if module.__activations__:
                layers.setdefault(module, deque()).append(name)
        for names in layers.values():
            names.rotate(1)
        self._layers.update(layers)


class _Recording(_Block):
    is_last = True

    def __init__(self, function: str, model: Module, names: str | Iterable[str], every_call: bool) -> None:
        super().__init__(function, model, names)
        self.activations = Activations()
        self._every_call = every_call
        self._level = getattr(innermost_trace(), "trace_level", 0)

    def apply(self, name: str, x: Array) -> Array:
        value = x
        # The trace ends before the block; in vmap, the values of all elements are recorded.
        while isinstance(value, Batch) or (type(value) is Tracer and value._namespace.trace_level > self._level):
            value = value._value
        if self._every_call:
            self.activations.setdefault(name, []).append(value)
        else:
            self.activations[name] = value
        return x


class _Intervention(_Block):
    def __init__(self, function: str, model: Module, interventions: Mapping[str, Any]) -> None:
        super().__init__(function, model, interventions)
        self.has_changed = False
        self._changes: dict[str, list[Any]] = {}
        for pattern, change in interventions.items():
            for name in self._matches[pattern]:
                self._changes.setdefault(name, []).append(change)

    def apply(self, name: str, x: Array) -> Array:
        self.has_changed = True
        for change in self._changes[name]:
            new = change if is_array(change) else change(array_namespace(x).asarray(x, copy=True))
            _check_same_kind(name, x, new)
            x = array_namespace(x, new).asarray(new)  # a constant of the trace, if it is a plain array
        return x


def _is_traced_copy(module: Any, model: Any) -> bool:
    """Return whether a module has the class and configuration of a model, and traced arrays."""
    if type(module) is not type(model) or not hasattr(module, "config") or module.config != model.config:
        return False
    _, array = next(module.named_arrays())
    xp: Any = array_namespace(array)
    return xp.is_trace or xp.is_abstract(array)


def _check_same_kind(name: str, x: Array, new: Any) -> None:
    """Raise an error unless an array may take the place of an activation."""
    received, expected = f"the intervention at {name!r} returned", f"expected an array like {_described(x)}"
    if not is_array(new):
        raise ShapeError(f"{received} {describe_type(new)}; {expected}")
    libraries = [array_namespace(array).name for array in (new, x)]
    if libraries[0] != libraries[1]:
        raise BackendError(f"{received} an array of {libraries[0]}; expected one of {libraries[1]}, as the activation")
    if tuple(new.shape) != tuple(x.shape) or new.dtype != x.dtype:
        raise ShapeError(f"{received} {_described(new)}; {expected}")
    if device(new) != device(x):
        raise BackendError(f"{received} an array on {device(new)}; expected one on {device(x)}, as the activation")


def _described(x: Array) -> str:
    return f"{dtype_name(x.dtype)}{list(x.shape)}"


def _names_of(model: Any, function: str) -> list[str]:
    names: dict[str, None] = {}  # in order
    if isinstance(model, Module):
        for path, module in model.named_modules():
            names.update((_joined(path, name), None) for name in module.__activations__)
    if not names:
        raise ConfigError(f"{function} got {describe_type(model)}; expected a model, e.g. a LanguageModel")
    return list(names)


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _as_patterns(patterns: Any) -> list[str]:
    items = [patterns] if isinstance(patterns, str) else list(patterns) if isinstance(patterns, Iterable) else None
    if not items or not all(isinstance(item, str) for item in items):
        raise ConfigError(f"names is {patterns!r:.60}; expected names of activations, e.g. 'layers.*.residual_out'")
    return items


def _matching(pattern: str, known: list[str], model: Module) -> list[str]:
    names = [name for name in known if name == pattern or fnmatchcase(name, pattern)]
    if not names:
        raise ConfigError(f"{type(model).__name__} has no activation {pattern!r}; {_hint(pattern, known)}")
    return names


def _hint(name: str, known: list[str]) -> str:
    """Name those with other numbers, or the closest match and all names with `*` in place of numbers."""
    same = [each for each in known if _kind(each) == _kind(name)]
    if same:
        return f"expected one of {', '.join(same if len(same) < 6 else [*same[:2], '...', same[-1]])}"
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.7)
    kinds = dict.fromkeys(_kind(each) for each in known)
    return (f"did you mean {near[0]!r}? Expected" if near else "expected") + f" one of {', '.join(kinds)}"


def _kind(name: str) -> str:
    return re.sub(r"-?\b\d+\b", "*", name)
