"""The traced array: a value, its trace, and the position on the tape of the record that made it."""

from __future__ import annotations

import copy
import functools
import importlib
import math
import operator
import sys
import weakref
from typing import Any

import numpy as np

from xformer import hints
from xformer.backends.arrays import CHECKED_CLASSES, check_class
from xformer.backends.library import NAMESPACE_OF_TYPE, TRACED
from xformer.errors import BackendError, DifferentiationError, ShapeError

_WITH_XP = " with xp = array_namespace(x)"
WRITE = "an assignment to a NumPy array (y += x) got a traced array"
CREATE = "create y with xp.zeros, where xp = array_namespace(x)"
WRITES_OUTER = "an array of an enclosing function was written in a differentiated one; return the new values instead"
WITHOUT_ARRAYS = frozenset({bool, int, float, str, type(None), type(...)})  # classes of most static arguments
PLAIN = object()  # the origin of arrays whose memory belongs to a plain array
NUMBER = object()  # the origin of immutable numbers, such as numpy.float64, whose value is stored as an array


# The call that made an array whose memory may be that of another one: that array, the name of the function in the
# namespace of both, and its further arguments. A plain tuple, since each reshape makes one.
View = tuple["Tracer", str, tuple[Any, ...], dict[str, Any]]


class InnerArray(Exception):
    """An array of an inner trace was handed to a function of an outer one."""

    def __init__(self, trace: Any) -> None:
        self.trace = trace


def _read_as(cls: type) -> Any:
    """Return the method that converts an array to a number of Python."""
    return lambda self: cls(self._namespace.read(self, cls.__name__))


class Tracer:
    """An Array API array that belongs to a trace: a `GradTrace` or a `GraphTrace`.

    `_value` is the array of the library below, or a tracer of the enclosing trace. In a derivative, `_index` is the
    position on the tape of the record that made it, or -1 for a constant (every integer and boolean array is one).
    `_origin` is the call that made it a `View` of another array, PLAIN, NUMBER, or None for memory of its own, and
    `_views` has weak references to arrays made from this one.
    """

    __slots__ = ("__weakref__", "_index", "_namespace", "_origin", "_value", "_views")

    def __init__(self, value: Any, namespace: Any, index: int) -> None:
        if type(value) not in CHECKED_CLASSES:
            check_class(value)
        self._value = value
        self._namespace = namespace
        self._index = index
        self._origin: Any = None
        self._views: list[weakref.ref[Tracer]] | None = None

    def add_view(self, view: Tracer, name: str, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        """Note that `view` was made from this array by a function that may return a view."""
        view._origin = (self, name, args, keywords)
        if self._views is None:
            self._views = []
        self._views.append(weakref.ref(view))

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("_") and self._namespace.library.name in ("numpy", "torch"):
            method = numpy_functions().method_of(self, name)
            if method is not None:
                return method
        if self._index < 0 and name == "__jax_array__":
            return lambda: self._value
        if self._index < 0 and not name.startswith("_"):
            found = getattr(self._value, name)  # raises before memory is copied
            is_fact = type(found) in WITHOUT_ARRAYS or type(found) is tuple
            return found if is_fact else getattr(self._namespace.plain_value(self), name)
        if name in hints.ARRAYS:
            hint = f"method {name!r}; {hints.ARRAYS[name]}{_WITH_XP if 'xp.' in hints.ARRAYS[name] else ''}"
        elif not name.startswith("_") and callable(getattr(self._namespace.library, name, None)):
            hint = f"method {name!r}; use xp.{name}(x){_WITH_XP}"
        else:
            hint = f"attribute {name!r}"
        raise AttributeError(f"traced arrays have no {hint}", name=name, obj=self)

    def __array_namespace__(self, *, api_version: str | None = None) -> Any:
        return self._namespace

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        value = self._namespace.read(self, "np.asarray")
        host = np.asarray(value if isinstance(value, np.ndarray | Tracer) else self._namespace.library.to_host(value))
        return np.array(host) if kwargs.get("copy") else host

    def __array_ufunc__(self, function: Any, method: str, *inputs: Any, **options: Any) -> Any:
        """Compute a function of NumPy; of arrays of another library only operators, as in `plain * traced`."""
        if "out" in options and options["out"][0] is inputs[0]:
            return self._namespace.read(self, WRITE)
        name = function.__name__
        operation = OPERATORS_OF_NUMPY.get(name) if method == "__call__" and not options else None
        if operation is not None:
            return getattr(self._namespace, f"operator_{operation}")(*inputs)
        if self._namespace.library.name != "numpy" and getattr(np, name, None) is function:
            return numpy_functions().call_on_values(getattr(function, method), inputs, options, "np.asarray")
        return numpy_functions().call_ufunc(function, method, inputs, options)

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Compute a function of NumPy."""
        if self._namespace.library.name != "numpy":
            return numpy_functions().call_on_values(function, args, kwargs, "np.asarray")
        name = f"{function.__module__}.{function.__name__}".removeprefix("numpy.").replace("lib.scimath", "emath")
        return numpy_functions().call_function(name, args, kwargs, self._namespace, function)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute a function of torch, or refuse it by a BackendError, a TypeError: torch then tries `x.__rmul__`.

        For `tensor += x`, it then computes `tensor = tensor + x`, which no other name of the tensor would see.
        """
        name = getattr(function, "__name__", "a function")
        is_write = (name.endswith("_") and not name.endswith("__")) or name in _IN_PLACE
        is_shared = is_write and type(args[0]) is not cls and _is_shared(sys.getrefcount(args[0]))
        values = [*args, *(kwargs or {}).values()]
        if not any(_depends(value) for value in values):  # such as torch.zeros(n)
            return function(*map(_constant, args), **{key: _constant(value) for key, value in (kwargs or {}).items()})
        if is_shared or (is_write and getattr(args[0], "_base", None) is not None):
            problem = f"{name} of torch got a traced array to write into a tensor that has another name or a view"
            raise DifferentiationError(f"{problem}; write into a copy: xp.asarray(x, copy=True)")
        if name in numpy_functions().OF_TORCH:
            return numpy_functions().call_torch(name, *args, **(kwargs or {}))
        hint = hints.ARRAYS.get(name, "use the functions of xp = array_namespace(x), as in xp.sum(x)")
        hint = "use xformer.cross_entropy(logits, labels)" if name == "cross_entropy" else hint
        raise BackendError(f"{name} of torch got a traced array and would lose its gradient; {hint}")

    def __dlpack__(
        self, *, stream: Any = None, max_version: Any = None, dl_device: Any = None, copy: Any = None
    ) -> Any:
        options = {"stream": stream, "max_version": max_version, "dl_device": dl_device, "copy": copy}
        options = {name: option for name, option in options.items() if option is not None}
        return self.__array__() if self._index >= 0 else self._namespace.plain_value(self).__dlpack__(**options)

    # --- attributes of the value -----------------------------------------------------------------------------------

    shape = property(operator.attrgetter("_value.shape"))
    dtype = property(operator.attrgetter("_value.dtype"))
    ndim = property(operator.attrgetter("_value.ndim"))
    device = property(operator.attrgetter("_value.device"))

    @property
    def size(self) -> Any:
        size = self._value.size
        return math.prod(self._value.shape) if callable(size) else size  # a method in torch, a number in the standard

    @property
    def T(self) -> Any:
        if self._namespace.library.name == "numpy":
            return self._namespace.permute_dims(self, tuple(range(self._value.ndim))[::-1])
        if self._value.ndim != 2:
            raise ShapeError(f"x.T needs a matrix, x has shape {tuple(self.shape)}; use xp.permute_dims(x, axes)")
        return self._namespace.matrix_transpose(self)

    @property
    def mT(self) -> Any:
        return self._namespace.matrix_transpose(self)

    def to_device(self, device: Any, /, *, stream: Any = None) -> Any:
        return self._namespace.to_device(self, device, stream=stream)

    def __dlpack_device__(self) -> Any:
        return self._value.__dlpack_device__()

    def __repr__(self) -> str:
        if not self._namespace.trace_level:
            return f"Tracer({self.dtype}, {tuple(self.shape)})"
        status = "constant" if self._index < 0 else "traced"
        return f"Tracer({status}, level {self._namespace.trace_level}, {self._value!r})"

    def __copy__(self) -> Tracer:
        """Return what copy.copy returns for an array of the library: a copy, or another name of its memory (torch)."""
        value = value_of(self)
        is_view = self._namespace.library.share_memory(copy.copy(value), value)
        return self._namespace.asarray(self, copy=None if is_view else True)

    def __deepcopy__(self, memo: Any) -> Tracer:
        return self._namespace.asarray(self, copy=True)

    def stopped(self) -> Tracer:
        """Return the array as a constant of its trace and of all enclosing ones."""
        x, is_batch = self._value, type(self._value) is Batch
        x = x._value if is_batch else x
        x = x.stopped() if type(x) is Tracer else x
        return Tracer(Batch(x) if is_batch else x, self._namespace, self._index if is_batch else -1)

    def __len__(self) -> int:
        return len(self._value)

    def __hash__(self) -> int:
        return id(self)

    # --- values outside the trace: for branches, and of arrays without a derivative -----------------------------------

    __bool__, __int__, __float__, __complex__ = map(_read_as, (bool, int, float, complex))

    def __round__(self, digits: int | None = None) -> Any:
        return round(float(self), digits)

    def __format__(self, form: str) -> str:
        return format(self._namespace.read(self, "float"), form) if form else str(self)

    __divmod__, __rdivmod__ = (lambda self, y: (self // y, self % y)), (lambda self, y: (y // self, y % self))

    def __index__(self) -> int:
        return operator.index(self._namespace.read(self, "operator.index"))

    # --- indexing -------------------------------------------------------------------------------------------------

    def __getitem__(self, key: Any) -> Any:
        return self._namespace.getitem(self, key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._namespace.write_item(self, key, value)

    def __iter__(self) -> Any:
        if not self.ndim:
            raise TypeError("iteration over a 0-d array")
        return iter(self._namespace.unstack(self, axis=0))


@functools.cache
def numpy_functions() -> Any:
    """Return the module of NumPy's functions, which is imported at its first use."""
    return importlib.import_module("xformer.tracing.numpy_functions")


def _is_shared(references: int) -> bool:
    """Return whether a tensor that an operator writes, with so many references, has another name or a view."""
    return references > _references_of_one_name()


@functools.cache
def _references_of_one_name() -> int:
    class Counter:
        @classmethod
        def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> int:
            return sys.getrefcount(args[0])

    count = importlib.import_module("torch").zeros(1)
    count += Counter()
    return int(count)


def _depends(value: Any) -> bool:
    """Return whether a value, or an item of it, depends on the inputs of a trace."""
    return value._index >= 0 if type(value) is Tracer else isinstance(value, tuple | list) and any(map(_depends, value))


def _constant(value: Any) -> Any:
    """Return the plain array of a constant, also in tuples and lists."""
    if isinstance(value, tuple | list):
        return type(value)(map(_constant, value))
    return value._namespace.plain_value(value) if type(value) is Tracer else value


def _binary(name: str) -> tuple[Any, Any]:
    """Return the methods of `a op b` and `b op a`: both call the namespace's operator."""
    operator_name = f"operator_{name}"

    def forward(self: Tracer, other: Any) -> Any:
        return getattr(self._namespace, operator_name)(self, other)

    def reflected(self: Tracer, other: Any) -> Any:
        return getattr(self._namespace, operator_name)(other, self)

    return forward, reflected


def _in_place(name: str) -> Any:
    """Return the method of `a op= b`: Python computes `a = a op b` for numbers, and arrays that have no such method."""
    operator_name = f"__i{name}__"

    def update(self: Tracer, other: Any) -> Any:
        value: Any = self
        while type(value) is Tracer or type(value) is Batch:
            if type(value) is Tracer and value._origin is NUMBER:
                return NotImplemented
            value = value._value
        return self._namespace.update(self, name, other) if hasattr(type(value), operator_name) else NotImplemented

    return update


class Batch:
    """The value of a traced array in `vmap`: its values for all elements, along the first axis of an array.

    Attributes:
        shape, ndim, dtype, device: Those for one element.
    """

    __slots__ = ("_value",)

    def __init__(self, value: Any) -> None:
        self._value = value

    shape = property(lambda self: self._value.shape[1:])
    ndim = property(lambda self: self._value.ndim - 1)
    size = property(lambda self: math.prod(self._value.shape[1:]))
    dtype = property(operator.attrgetter("_value.dtype"))
    device = property(operator.attrgetter("_value.device"))

    def __len__(self) -> int:
        return int(self._value.shape[1])

    def __repr__(self) -> str:
        return f"a batch of {self._value!r}"


def value_of(x: Any) -> Any:
    """Return the array of the library in a traced one."""
    while type(x) is Tracer or type(x) is Batch:
        x = x._value
    return x


BINARY_OPERATORS = (
    *("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul"),
    *("and", "or", "xor", "lshift", "rshift"),
)
COMPARISONS = ("lt", "le", "gt", "ge", "eq", "ne")
UNARY_OPERATORS = ("neg", "pos", "abs", "invert")
OPERATORS = (*BINARY_OPERATORS, *COMPARISONS, *UNARY_OPERATORS)

_IN_PLACE = {f"__i{name}__" for name in BINARY_OPERATORS}
_NAMES_IN_NUMPY = (
    *("add", "subtract", "multiply", "divide", "floor_divide", "remainder", "power", "matmul"),
    *("bitwise_and", "bitwise_or", "bitwise_xor", "left_shift", "right_shift"),
    *("less", "less_equal", "greater", "greater_equal", "equal", "not_equal"),
)
OPERATORS_OF_NUMPY = dict(zip(_NAMES_IN_NUMPY, (*BINARY_OPERATORS, *COMPARISONS), strict=True))

NAMESPACE_OF_TYPE[Tracer] = TRACED
CHECKED_CLASSES.add(Batch)
for _name in BINARY_OPERATORS:
    _forward, _reflected = _binary(_name)
    setattr(Tracer, f"__{_name}__", _forward)
    setattr(Tracer, f"__r{_name}__", _reflected)
    setattr(Tracer, f"__i{_name}__", _in_place(_name))
for _name in COMPARISONS:
    setattr(Tracer, f"__{_name}__", _binary(_name)[0])
for _name in UNARY_OPERATORS:
    setattr(Tracer, f"__{_name}__", lambda self, _name=f"operator_{_name}": getattr(self._namespace, _name)(self))
