"""The functions of a trace: each computes in the base namespace, appends a record to the tape and wraps the result.

There are four kinds: functions with a rule; functions of a list of arrays; functions with several outputs; and
functions without a rule, whose result is a constant unless they have a decomposition.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import operator
import re
from collections.abc import Callable
from types import ModuleType
from typing import Any

from xformer import hints
from xformer.backends import Library, device, extra, is_inexact
from xformer.errors import DifferentiationError
from xformer.tracing.rule import DECOMPOSITIONS, NOT_DIFFERENTIABLE, Rule
from xformer.tracing.tracer import BINARY_OPERATORS, OPERATORS, PLAIN, InnerArray, Tracer, numpy_functions
from xformer.tree import is_array, rebuild_sequence

Function = Callable[..., Any]
# Functions whose results may share memory with their first argument; broadcast_arrays decomposes into such calls.
VIEWS = {
    *("asarray", "astype", "broadcast_arrays", "broadcast_to", "conj", "expand_dims", "flip", "from_dlpack", "getitem"),
    *("imag", "matrix_transpose", "moveaxis", "operator_pos", "permute_dims", "positive", "real", "reshape", "squeeze"),
    "to_device",
}


class Trace:
    """A namespace that records what its functions compute in a base namespace.

    A subclass has `bind(name, function)`, which returns the traced version of a function of the base namespace, and
    `ended(name)`, which returns the error for a use of an array after the end.

    Attributes:
        base: The namespace below; the values of traced arrays are arrays of it.
        library: The library below all traces.
        is_closed: Whether the trace has ended, so that its arrays cannot be used any more.
    """

    is_trace = True
    is_closed = True  # for __del__ of an instance that was copied without attributes
    base: Any
    library: Any

    def __getattr__(self, name: str) -> Any:
        """Bind a function at its first use; a trace uses only some twenty of the two hundred."""
        if name.startswith("__") and name != "__array_namespace_info__":
            return getattr(self.base, name)
        if self.is_closed:
            raise self.ended(name)
        if hasattr(Library, name) and name not in extra.NAMES:
            return getattr(self.library, name)
        try:
            value = base_function(self.base, name)
            if isinstance(value, ModuleType | Extension):
                value = Extension(self, name, value)
            elif callable(value) and not isinstance(value, type):  # no dtype or constant
                value = self.bind(name, value)
        except AttributeError as error:
            if name not in hints.ARRAYS or isinstance(error, NoRuleError):
                raise
            problem = f"the namespace of {self.base.name} has no function {name!r}"
            raise AttributeError(f"{problem}; {hints.ARRAYS[name]}") from None
        setattr(self, name, value)
        return value


def bind_rule(trace: Any, name: str, function: Function, rule: Rule) -> Function:
    """Return the traced version of a function with a rule."""
    positions, kept, is_view = rule.positions, rule.kept, name in VIEWS
    steps, pull_all = rule.steps, rule.pull_all

    def call(*args: Any, **keywords: Any) -> Any:
        values: list[Any] = []
        parents: list[int] = []
        inputs, static, num_tracked = list(args), (), 0
        try:
            for i, x in enumerate(args):
                if type(x) in (tuple, list):
                    x = inputs[i] = trace.stacked(x)
                if i not in positions:
                    static += _unwrap_static(trace, name, (x,))
                    values.append(static[-1])
                elif type(x) is Tracer and x._namespace is trace:
                    values.append(x._value)
                    parents.append(x._index)
                    num_tracked += x._index >= 0
                else:
                    values.append(x if type(x) is float else trace.unwrap(x))
                    parents.append(-1)
            keywords = _unwrap_static(trace, name, keywords) if keywords else keywords
        except InnerArray as error:
            return getattr(error.trace, name)(*args, **keywords)
        output = function(*values, **keywords)
        if not num_tracked:
            result = trace.wrap(output)
        elif num_tracked == len(steps):
            pool = (*[values[i] for i in positions], output)
            result = trace.record(
                output, pull_all, parents, (*[select(pool) + static for select, _ in steps], keywords)
            )
        else:
            tracked = int(parents[0] < 0)  # the other one of two is a constant
            other = positions[1 - tracked]
            values[other] = trace.keep(inputs[other]) if other in kept else values[other]
            select, pull = steps[tracked]
            pool = (*[values[i] for i in positions], output)
            result = trace.record(output, pull, (parents[tracked],), (select(pool) + static, keywords))
        if is_view and not keywords.get("copy"):
            return as_view(inputs[0], result, name, static, keywords)
        return result

    return call


def _unwrap_static(trace: Any, name: str, arguments: Any) -> Any:
    """Unwrap positional or keyword arguments that have no derivative."""
    values = tuple(arguments.values()) if isinstance(arguments, dict) else arguments
    if trace.depends(values):
        hint = "by keyword; pass arrays by position" if isinstance(arguments, dict) else "as an argument without a rule"
        raise DifferentiationError(f"{name} got a traced array {hint}, or use stop_gradient(x)")
    if isinstance(arguments, dict):
        if "dim" in arguments or "keepdim" in arguments:  # names of torch, which the derivative rules lack
            raise TypeError(f"{name} got dim= or keepdim= of torch; use axis= and keepdims=")
        return {key: trace.keep(value) for key, value in arguments.items()}
    return trace.keep(arguments)


def as_view(source: Any, result: Any, name: str, args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    """Note where a result comes from that may share the memory of its first argument; return it."""
    if type(result) is not Tracer:
        return result
    value, given = result._value, source._value if type(source) is Tracer else source
    if value is not given and type(value) is not Tracer and getattr(value, "base", value) is None:
        return result  # NumPy says that it owns its memory
    if type(source) is not Tracer:
        result._origin = PLAIN if is_array(source) else None
    elif source._origin is PLAIN or source._namespace is not result._namespace:
        result._origin = PLAIN
    else:
        source.add_view(result, name, args, keywords)
    return result


def bind_sequence(trace: Any, name: str, function: Function, formula: Function) -> Function:
    """Return the traced version of concat or stack, whose inputs are a list."""

    def call(arrays: Any, /, **keywords: Any) -> Any:
        arrays = [x if is_array(x) else trace.asarray(x) for x in map(trace.stacked, arrays)]
        values = [trace.unwrap(array) for array in arrays]
        output = function(values, **keywords)
        parents = [trace.position(array) for array in arrays]
        if max(parents) < 0:
            return trace.wrap(output)
        shapes = [tuple(value.shape) for value in values]
        return trace.record(output, lambda xp, g, _: formula(xp, g, shapes, **keywords), parents, None)

    return innermost(trace, name, call, has_list=True)


def bind_outputs(trace: Any, name: str, function: Function, formula: Function) -> Function:
    """Return the traced version of a function of one array with several outputs, such as a factorization."""

    def pull(xp: Any, cotangents: Any, residuals: Any) -> Any:
        x, outputs, keywords = residuals
        filled = [xp.zeros_like(y) if g is None else g for g, y in zip(cotangents, outputs, strict=True)]
        return (formula(xp, filled, x, outputs, **keywords),)

    def call(x: Any, /, **keywords: Any) -> Any:
        outputs = function(trace.unwrap(x), **keywords)
        results = trace.wrap(outputs)
        if outputs and trace.position(x) >= 0:
            results = trace.record_outputs(outputs, pull, (trace.position(x),), (x._value, tuple(outputs), keywords))
        if name == "unstack":
            before = (slice(None),) * (keywords.get("axis", 0) % x.ndim)
            results = [as_view(x, y, "getitem", ((*before, i, ...),), {}) for i, y in enumerate(results)]
        return rebuild_sequence(outputs, results)

    return innermost(trace, name, call)


class NoRuleError(DifferentiationError, AttributeError):
    """A function beside the standard has no rule; a namespace lacks it, so that `hasattr` is false."""


def bind_without_rule(trace: Any, name: str, function: Function) -> Function:
    """Return the traced version of any other function: a constant, a decomposition, or an error."""
    is_constant = name in NOT_DIFFERENTIABLE
    hint = hints.ARRAYS.get(name, "define one with xformer.tracing.defvjp, or use stop_gradient(x)")
    if not (is_constant or name in DECOMPOSITIONS or _STANDARD.match(name)):
        raise NoRuleError(f"{name} has no derivative rule; {hint}")

    def call(*args: Any, **keywords: Any) -> Any:
        if not is_constant and (name in VIEWS or any(map(trace.depends, (*args, *keywords.values())))):
            if name in DECOMPOSITIONS:
                return DECOMPOSITIONS[name](trace, *args, **keywords)
            raise DifferentiationError(f"{name} has no derivative rule; {hint}")
        unwrapped = {key: trace.unwrap(value) for key, value in keywords.items()}
        return trace.wrap(function(*map(trace.unwrap, args), **unwrapped))

    return innermost(trace, name, call)


def innermost(trace: Any, name: str, call: Function, *, has_list: bool = False) -> Function:
    """Stack lists of traced arrays, and let an inner trace record the call if one of its arrays is an argument.

    The first argument of concat and stack is a list of arrays, which is not stacked.
    """

    def dispatch(*args: Any, **keywords: Any) -> Any:
        try:
            return call(*(args if has_list else map(trace.stacked, args)), **keywords)
        except InnerArray as error:
            return getattr(error.trace, name)(*args, **keywords)

    return dispatch


# --- functions of the base namespace ----------------------------------------------------------------------------------

# Names of functions without a rule that a namespace has.
_STANDARD = re.compile(r"arange|full|linspace|operator_|inplace_|getitem|setitem|to_device|random\.|special\.")
IN_BOTH = {"matmul", "matrix_transpose", "tensordot", "vecdot"}  # the main namespace and linalg
# Packages whose `special` has functions of scipy.special, by library.
_SPECIAL = {"numpy": "scipy", "torch": "torch", "jax": "jax.scipy", "cupy": "cupyx.scipy"}
_PYTHON_OPERATORS: dict[str, Function] = {f"operator_{name}": getattr(operator, f"__{name}__") for name in OPERATORS}


def base_function(base: Any, name: str) -> Any:
    """Return the function called `name` in the base namespace of a trace; an enclosing trace knows all names itself."""
    if base.is_trace:
        return getattr(base, name)
    if "." in name:
        extension, _, name = name.partition(".")
        return _special_function(base, name) if extension == "special" else getattr(getattr(base, extension), name)
    if name == "special" and importlib.util.find_spec("scipy"):
        return importlib.import_module("scipy.special")  # which has the names
    if name in _PYTHON_OPERATORS:
        return getattr(base, name, _PYTHON_OPERATORS[name])
    if name in _OWN_FUNCTIONS:
        return functools.partial(_OWN_FUNCTIONS[name], base)
    return getattr(base, name)


def _special_function(library: Any, name: str) -> Any:
    """Return the function of a library with this name, or that of SciPy, which computes on the host.

    It takes no options of ufuncs, such as `where`.
    """
    package = _SPECIAL.get(library.name)
    own = getattr(importlib.import_module(f"{package}.special"), name, None) if package else None
    function = own or getattr(importlib.import_module("scipy.special"), name)

    def call(*args: Any, **options: Any) -> Any:
        if options:
            raise DifferentiationError(f"special.{name} of a traced array has no argument {next(iter(options))}")
        if own is not None:
            return own(*args)
        place = device(next(x for x in args if hasattr(x, "shape")))
        values = (library.to_host(x) if hasattr(x, "shape") else x for x in args)
        return library.from_host(function(*values), device=place)

    return call


class Extension:
    """The functions of an extension of the standard, such as `xp.linalg`, in a trace, which has them by full name."""

    def __init__(self, trace: Any, name: str, module: Any) -> None:
        self._trace, self._name, self._module = trace, name, module

    def __getattr__(self, name: str) -> Any:
        if not callable(getattr(self._module, name)):
            return getattr(self._module, name)
        return getattr(self._trace, name if name in IN_BOTH else f"{self._name}.{name}")


def _to_device(xp: Any, x: Any, device: Any, *, stream: Any = None) -> Any:
    from array_api_compat import to_device  # the one place where arrays change device inside a trace

    return to_device(x, device, stream=stream)


def _in_place(name: str) -> Function:
    """Return the function of (xp, x, other) that computes in a new array what `x op= other` leaves in x."""
    compute, update = getattr(operator, f"__{name}__"), getattr(operator, f"__i{name}__")

    def inplace(xp: Any, x: Any, other: Any, /) -> Any:
        result = compute(x, other)
        facts = ("dtype", "shape", "strides", "__class__")  # NumPy returns a number for an array without axes
        if all(getattr(result, fact, None) == getattr(x, fact, None) for fact in facts):
            return result
        return update(xp.asarray(x, copy=True), other)  # which casts to the dtype of x, or raises

    return inplace


_OWN_FUNCTIONS: dict[str, Function] = {"getitem": lambda xp, x, key: x[key], "to_device": _to_device}
_OWN_FUNCTIONS |= {"setitem": lambda xp, x, value, key: xp.set_item(x, value, key)}
_OWN_FUNCTIONS |= {f"inplace_{name}": _in_place(name) for name in BINARY_OPERATORS}


# --- einops and opt_einsum, which look for functions by the class of an array -----------------------------------------


def _function(name: str) -> Callable[..., Any]:
    """Return a function of NumPy for traced arrays of any library."""
    return lambda *args, **options: numpy_functions().call_function(name, args, options)


@functools.cache
def register() -> None:
    """Register traced arrays with those packages that are installed and have the private names used here."""
    with contextlib.suppress(Exception):
        dispatch: Any = importlib.import_module("opt_einsum.backends.dispatch")
        dispatch._cached_funcs |= {(name, "xformer"): _function(name) for name in ("einsum", "tensordot", "transpose")}
    methods: dict[str, Any] = {
        "is_appropriate_type": lambda x: type(x) is Tracer,
        "is_float_type": lambda x: is_inexact(x.dtype),
        "reduce": lambda x, operation, axes: _function(operation)(x, tuple(axes)),
        "stack_on_zeroth_dimension": _function("stack"),
        "add_axis": _function("expand_dims"),
        "concat": _function("concatenate"),
        **{name: _function(name) for name in ("einsum", "reshape", "tile", "transpose")},
    }
    attributes = {"framework_name": "xformer", **{name: staticmethod(method) for name, method in methods.items()}}
    with contextlib.suppress(Exception):
        base: Any = importlib.import_module("einops._backends").AbstractBackend
        base.of_traced_arrays = type("Backend", (base,), attributes)  # einops asks for subclasses, and keeps none
