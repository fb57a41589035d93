"""Transformations of functions: value_and_grad, grad, vjp, remat, stop_gradient; and the backward pass.

It walks the tape from the end and pulls each cotangent back to the inputs of its record.
"""

from __future__ import annotations

import functools
import itertools
import operator
import sys
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from typing import Any, Literal, NamedTuple, overload

import numpy as np

from xformer.backends import accumulation_dtype, array_namespace, dtype_name, is_complex, is_floating
from xformer.backends.array_types import Of, P, Positions, R, S, T, Ts
from xformer.backends.arrays import check_class, to_host
from xformer.backends.numpy import owns_memory
from xformer.errors import BackendError, ConfigError, DifferentiationError, ShapeError, describe_type
from xformer.tracing.arguments import check_function, with_arrays
from xformer.tracing.namespace import WRITTEN_LATER, GradTrace, base_for, tracing
from xformer.tracing.record import base_function
from xformer.tracing.rule import Record
from xformer.tracing.tracer import PLAIN, Tracer, value_of
from xformer.tree import Module, flatten, is_array, items_of, map_arrays, map_items

_WRITES_ARGUMENT = "the function writes into its argument, which vjp, jvp, vmap and remat need; write into a copy of it"


class _Input(NamedTuple):
    """An input of a trace.

    Attributes:
        position: Its position on the tape, or -1.
        value: Its array.
    """

    position: int
    value: Any


@overload
def value_and_grad(  # type: ignore[overload-overlap]
    function: Of[T, P, R], argnums: Literal[0] = 0, *, has_aux: bool = False, on_gradient: Any = None
) -> Of[T, P, tuple[R, T]]: ...
@overload
def value_and_grad(
    function: Callable[P, R], argnums: Positions, *, has_aux: bool = False, on_gradient: Any = None
) -> Callable[P, tuple[R, Any]]: ...
def value_and_grad(
    function: Callable[..., Any],
    argnums: Positions = 0,
    *,
    has_aux: bool = False,
    on_gradient: Callable[[int, Any], object] | None = None,
) -> Callable[..., Any]:
    """Return a function that computes the value of `function` and its gradient with respect to an argument.

    The arrays of all other arguments arrive as constants of the same namespace, so that functions of other libraries,
    which refuse arrays of two namespaces, take them together; beside a Module, they stay as they are. Move an array
    that `function` closes over by `xp.asarray(c)`, where `xp = array_namespace(x)`.

    Args:
        function: Function of Modules, arrays, and tuples, lists and dicts of them, of any library. It returns a
            floating-point scalar, or (scalar, auxiliary output) with `has_aux`.
        argnums: Position of the argument to differentiate. For several positions, the gradient is a tuple.
        has_aux: Whether `function` returns auxiliary output.
        on_gradient: Called in the backward pass with the number of a floating array of the argument, in the order of
            `flatten_parameters`, and its gradient, as soon as it is known: for example, to send it to another machine.

    Returns:
        A function with the same arguments that returns (value, gradient), or ((value, auxiliary output), gradient). The
        gradient has the structure, shapes and dtypes of the argument, with None for frozen arrays and integers.
        Its arrays may share memory, so do not write into them.

    Raises:
        ShapeError: When called, if the value is not a floating-point scalar, or if the argument has no floating array.
        ConfigError: When called, if there is no positional argument at one of the positions, or if two are the same.

    Examples:
        >>> import numpy as np
        >>> value_and_grad(lambda x: (x * x)[0])(np.asarray([3.0]))
        (np.float64(9.0), array([6.]))
    """
    check_function("value_and_grad", function, argnums)

    @functools.wraps(function)
    def differentiated(*args: Any, **keywords: Any) -> Any:
        frozen: list[int] = []
        selected = selected_arguments(args, argnums)
        leaves, rebuild = flatten(selected, frozen=frozen)
        with tracing(_base_of(leaves, selected)) as trace:
            traced, inputs = _leaves_of(trace, leaves, frozen)
            given, has_others = (args, keywords), bool(keywords) or len(args) > 1
            given = trace.constants(given) if has_others and not isinstance(selected, Module) else given
            result = function(*replaced(given[0], argnums, rebuild(traced)), **given[1])
            value, extra = split_aux(result) if has_aux else (result, None)
            _check_scalar(value)
            unwrapped = map_arrays(trace.unwrap, (value, extra)) if has_aux else trace.unwrap(value)
        gradient = _pull_back(trace, [value], None, inputs, on_gradient)
        written = [
            (array, tracer._value)
            for array, tracer, given in zip(leaves, traced, inputs, strict=True)
            if _is_written(tracer, given.value)
        ]
        others = flatten((args, keywords))[0] if written else ()
        for array, value in written:
            if sum(trace.share_memory(array, other) for other in others) > 1:
                problem = "the function writes into an argument that shares memory with another one"
                raise DifferentiationError(f"{problem}; pass a copy of one")
            array[...] = value
        return unwrapped, rebuild(gradient, keep=False)

    return differentiated


def _base_of(leaves: Sequence[Any], value: Any) -> Any:
    """Return `base_for(leaves)`; if the value is a module with arrays of two libraries, the error names two of them."""
    try:
        return base_for(leaves)
    except BackendError:
        arrays = value.named_arrays() if isinstance(value, Module) else ()
        libraries = {array_namespace(array).name: name for name, array in arrays}
        if len(libraries) < 2:
            raise
        (first, name), (second, other), *_ = libraries.items()
        problem = f"{name} is an array of {first}, and {other} of {second}"
        raise BackendError(f"{problem}; pass one init= to all layers, also to norms, or use model.to(xp)") from None


def selected_arguments(args: tuple[Any, ...], argnums: Positions) -> Any:
    """Return the argument at a position, or the tuple of those at several."""
    try:
        if isinstance(argnums, int):
            value = args[argnums]
            return value if isinstance(value, Module) else as_argument(value, argnums)
        positions = [range(len(args))[position] for position in argnums]
    except (IndexError, TypeError):
        problem = f"argnums is {argnums!r}, but the function got {len(args)} positional arguments"
        raise ConfigError(f"{problem}; pass the arguments to differentiate by position") from None
    if len(set(positions)) < len(positions):
        raise ConfigError(f"argnums is {argnums!r} and names an argument twice; expected each position once")
    return tuple(as_argument(args[position], position) for position in positions)


def as_argument(value: Any, position: int | None = None) -> Any:
    """Return floats and lists of them as arrays like those in the same tree, or of NumPy; other values as they are.

    A position requires an array, as the argument there is to be differentiated.
    """
    if is_array(value):
        return value
    arrays = flatten(value)[0]

    def make(numbers: Any) -> Any:
        array, dtypes = np.asarray(numbers), [x.dtype for x in arrays if is_floating(x.dtype)]
        if not dtypes:
            return array
        return array_namespace(*arrays).asarray(numbers, dtype=dtypes[0]) if array.dtype.kind == "f" else numbers

    try:
        changed = _numbers(value, make)
    except ValueError:  # NumPy's, for rows that differ in length
        changed = None
    if position is not None and (changed is None or not flatten(changed)[0]):
        received = f"argument {position} is {describe_type(value)}"
        raise ShapeError(f"{received}; expected a floating array, a float, a list of floats, or a tree of them")
    return changed


def flatten_arguments(name: str, primals: Sequence[Any]) -> tuple[list[Any], Callable[..., Any]]:
    """Flatten all arguments of a function, of which floats become arrays."""
    leaves, rebuild = flatten(tuple(map(as_argument, primals)))
    if not leaves:
        types = ", ".join(map(describe_type, primals)) or "no primals"
        raise ShapeError(f"{name} got {types}; expected a floating array, a float, a list of floats, or a tree of them")
    return leaves, rebuild


def _numbers(value: Any, make: Callable[[Any], Any]) -> Any:
    if type(value) is float or (type(value) is list and value and {*map(type, items_of(value))} <= {int, float}):
        return make(value)
    is_tree = isinstance(value, tuple) or type(value) in (list, dict)
    return map_items(lambda item: _numbers(item, make), value) if is_tree else value


def split_aux(result: Any) -> tuple[Any, Any]:
    """Return the output of a function and its auxiliary output."""
    if not (isinstance(result, tuple) and len(result) == 2):
        raise ShapeError(f"the function returned {result!r}; with has_aux, expected (value, auxiliary output)")
    return result


def check_unwritten(traced: Sequence[Tracer], given: Sequence[Any]) -> None:
    """Raise an error if a function has written into one of its arguments, which had the given values."""
    if any(map(_is_written, traced, given)):
        raise DifferentiationError(_WRITES_ARGUMENT)


def _is_written(traced: Tracer, given: Any) -> bool:
    """Return whether an argument has other values than the given ones; reading a constant may have copied them."""
    is_copied = traced._value is not given and traced._origin is PLAIN
    values = {to_host(value_of(x)).tobytes() for x in (traced, given) if is_copied}
    return len(values) > 1 if is_copied else traced._value is not given


def replaced(args: tuple[Any, ...], argnums: Positions, value: Any) -> tuple[Any, ...]:
    """Return the arguments with others at one or several positions."""
    changed = list(args)
    for position, item in [(argnums, value)] if isinstance(argnums, int) else zip(argnums, value, strict=True):
        changed[position] = item
    return tuple(changed)


@overload
def grad(function: Of[T, P, tuple[Any, S]], *, has_aux: Literal[True]) -> Of[T, P, tuple[T, S]]: ...
@overload
def grad(function: Of[T, P, Any], argnums: Literal[0] = 0, *, has_aux: Literal[False] = False) -> Of[T, P, T]: ...
@overload
def grad(function: Callable[P, Any], argnums: Positions, *, has_aux: bool = False) -> Callable[P, Any]: ...
def grad(function: Callable[..., Any], argnums: Positions = 0, *, has_aux: bool = False) -> Callable[..., Any]:
    """Return a function that computes the gradient of `function` with respect to an argument.

    The other arguments are constants of the same namespace. Move an array that `function` closes over by
    `array_namespace(x).asarray(c)` if functions of other libraries take it together with `x`; see `value_and_grad`.

    Args:
        function: Function that returns a floating-point scalar; see `value_and_grad`.
        argnums: Position of the argument, or several positions.
        has_aux: Whether `function` returns auxiliary output; then the result is (gradient, auxiliary output).
    """
    check_function("grad", function, argnums)
    both = value_and_grad(function, argnums, has_aux=has_aux)

    @functools.wraps(function)
    def gradient(*args: Any, **keywords: Any) -> Any:
        value, gradients = both(*args, **keywords)
        return (gradients, value[1]) if has_aux else gradients

    return gradient


def vjp(function: Callable[[*Ts], R], *primals: *Ts) -> tuple[R, Callable[[Any], tuple[*Ts]]]:
    """Compute `function(*primals)` and the pullback of cotangents.

    Args:
        function: Function of arrays or trees of arrays.
        *primals: Its arguments.

    Returns:
        The output, and a function that takes a cotangent (a tree like the output) and returns a tuple with one
        cotangent for each primal, in which integer and boolean arrays have None, and frozen ones do not. The pullback
        consumes the trace, so it can be called once. It raises ShapeError if the cotangent does not have the shapes of
        the output, or is complex.

    Raises:
        ShapeError: If the primals have no floating array.
    """
    check_function("vjp", function)
    leaves, rebuild = flatten_arguments("vjp", primals)
    output, pull = vjp_in(base_for(leaves), lambda arrays: function(*rebuild(arrays)), leaves, is_public=True)
    pending = [(flatten(output)[0], pull)]

    def pullback(cotangent: Any) -> tuple[Any, ...]:
        if not pending:
            raise DifferentiationError("this pullback was called before; call vjp again for another cotangent")
        outputs, pull = pending[0]
        seeds = flatten(with_arrays(cotangent, outputs[0]) if outputs else cotangent)[0]
        shapes, expected = ([tuple(array.shape) for array in arrays] for arrays in (seeds, outputs))
        if shapes != expected:
            raise ShapeError(f"the cotangent has shapes {shapes}; expected those of the output, {expected}")
        dtypes = [dtype_name(array.dtype) for array in seeds]
        if any(is_complex(seed.dtype) > is_complex(array.dtype) for seed, array in zip(seeds, outputs, strict=True)):
            raise ShapeError(f"the cotangent has dtypes {dtypes}; expected real numbers, as the output has")
        array_namespace(*outputs, *seeds)
        for seed in seeds:
            check_class(seed)
        pending.clear()
        return rebuild(pull(seeds), keep=False)

    return output, pullback


def vjp_in(
    xp: Any,
    function: Callable[[list[Any]], Any],
    arrays: list[Any],
    constants: Collection[int] = (),
    *,
    is_public: bool = False,
) -> tuple[Any, Callable[[Any], list[Any]]]:
    """Compute the VJP of a function of a list of arrays in the namespace `xp`, whichever traces are active.

    Args:
        xp: Namespace of the arrays.
        function: Function of the list.
        arrays: The arrays.
        constants: Positions of arrays without a derivative, besides integers and booleans.
        is_public: Whether the caller may write into the arrays, and into those of the output, before the pullback.

    Returns:
        The output, and a function that takes the list of the cotangents of its arrays, None for unused ones, and
        returns the list of those of `arrays`, None for constants. It can be called once.
    """
    with tracing(xp) as trace:
        values = list(map(trace.keep_outer, arrays)) if is_public else arrays
        traced, inputs = _leaves_of(trace, values, constants)
        result = function(traced)
        for array, value, tracer, given in zip(arrays, values, traced, inputs, strict=True):
            if _is_written(tracer, given.value):
                if array is value:
                    raise DifferentiationError(_WRITES_ARGUMENT)
                array[...] = tracer._value
        unwrap = (lambda x: trace.keep_outer(trace.unwrap(x))) if is_public else trace.unwrap
        output = map_arrays(unwrap, result)
    outputs = flatten(result)[0]
    return output, lambda cotangents: _pull_back(trace, outputs, cotangents, inputs)


def remat(function: Callable[P, R]) -> Callable[P, R]:
    """Return a function that saves only its inputs and is computed again in the backward pass.

    Rematerialization trades time for memory (Chen et al., 2016, "Training Deep Nets with Sublinear Memory Cost").
    Random draws repeat, since an Rng is a value.

    Args:
        function: Function whose differentiable inputs are all arguments; a Module may be one.

    Raises:
        DifferentiationError: When called, if `function` closes over an array of the trace.
    """
    check_function("remat", function)

    @functools.wraps(function)
    def rematerialized(*args: Any, **keywords: Any) -> Any:
        leaves, rebuild = flatten((args, keywords))
        trace = array_namespace(*leaves) if leaves else None
        if type(trace) is not GradTrace:  # others keep no tape
            return function(*args, **keywords)

        def run(arrays: Sequence[Any]) -> Any:
            args, keywords = rebuild(arrays)
            return function(*args, **keywords)

        values = [trace.keep(leaf) for leaf in leaves]
        with tracing(trace.base) as inner:  # without inputs, it records nothing, but follows writes
            constants = list(map(inner.wrap, values))
            result = map_arrays(inner.unwrap, run(constants))
        check_unwritten(constants, values)
        outputs, rebuild_result = flatten(result)
        parents = [trace.position(leaf) for leaf in leaves]
        if max(parents) < 0:
            return map_arrays(trace.wrap, result)
        traced = trace.record_outputs(outputs, _recompute, parents, (run, values, parents))
        for leaf, output in itertools.product(leaves, traced):
            if type(leaf) is Tracer and trace.share_memory(leaf, output):
                leaf.add_view(output, "remat", (), {})
        return rebuild_result(traced)

    return rematerialized


def _recompute(xp: Any, cotangents: Any, saved: Any) -> Any:
    """Pull cotangents back through a rematerialized function: trace it from its saved inputs."""
    run, values, parents = saved
    _, pull = vjp_in(xp, run, values, [position for position, parent in enumerate(parents) if parent < 0])
    return pull(cotangents)


def stop_gradient(x: T) -> T:
    """Return `x` as a constant, through which nothing is differentiated.

    Args:
        x: An array, traced or not.
    """
    if type(x) is Tracer:
        constant = x.stopped()
        if x._origin is PLAIN:
            constant._origin = PLAIN
        else:
            x.add_view(constant, "stop_gradient", (), {})
        return constant
    return x


def keep_for(like: Any, x: Any) -> Any:
    """Return a plain array as a constant of the trace of `like`, so that it is copied once, not by each operation."""
    trace = array_namespace(like)
    return trace.wrap(trace.keep(x)) if isinstance(trace, GradTrace) and type(x) is not Tracer else x


def _pull_back(
    trace: GradTrace,
    outputs: list[Any],
    seeds: list[Any] | None,
    inputs: list[_Input],
    on_gradient: Callable[[int, Any], object] | None = None,
) -> list[Any]:
    """Pull cotangents of `outputs` back to the inputs of an ended trace; inputs without influence get zeros.

    `seeds` are the cotangents, None for unused outputs; without seeds, they are ones. `on_gradient` gets the number of
    each input and its cotangent as soon as it is complete. The result has None for inputs that are constants.
    """
    xp = trace.base
    for seed in seeds or ():
        if type(seed) is Tracer and seed._namespace.trace_level > xp.trace_level:
            xp = seed._namespace  # a pullback that is itself being differentiated
    by_position: dict[int, Any] = {}
    for output, seed in zip(outputs, seeds or [None] * len(outputs), strict=True):
        index = trace.position(output)
        if index < 0 or (seeds and seed is None):
            continue
        cotangent = xp.ones_like(output._value) if seed is None else unbroadcast(xp, seed, *trace.tape[index][3:])
        previous = by_position.get(index)
        by_position[index] = cotangent if previous is None else previous + cotangent

    def gradient(position: int, cotangent: Any) -> Any:
        return xp.zeros_like(leaves[position].value) if cotangent is None else cotangent

    leaves = [given for given in inputs if given.position >= 0]  # by position on the tape
    on_leaf = None
    if on_gradient is not None:

        def on_leaf(position: int, cotangent: Any) -> None:
            on_gradient(position, gradient(position, cotangent))

    try:
        gradients = backward(xp, trace.tape, by_position, len(leaves), on_leaf)
    finally:
        is_unchanged = trace.end_keeping()
    if not is_unchanged:
        raise DifferentiationError(WRITTEN_LATER)
    for position, cotangent in enumerate(gradients):
        if cotangent is None:
            gradients[position] = gradient(position, None)
    return [None if given.position < 0 else gradients[given.position] for given in inputs]


def _leaves_of(trace: GradTrace, arrays: list[Any], frozen: Collection[int] = ()) -> tuple[list[Tracer], list[_Input]]:
    """Return the arrays as inputs of a trace, and their state before the function, which may write into them.

    Integers, booleans and those at `frozen` positions become constants.
    """
    constants = set(frozen)
    inputs = iter(trace.leaves([array for position, array in enumerate(arrays) if position not in constants]))
    traced = [trace.wrap(array) if position in constants else next(inputs) for position, array in enumerate(arrays)]
    if not trace.tape and constants:
        raise ConfigError("all arrays are frozen; expected at least one parameter: use xformer.unfreeze")
    if not trace.tape:
        dtypes = ", ".join(sorted({dtype_name(array.dtype) for array in arrays}))
        received = f"there are only arrays of {dtypes} to differentiate"
        raise ShapeError(f"{received}; expected floats of 16 to 64 bits: 1.0 for 1")
    return traced, [_Input(tracer._index, tracer._value) for tracer in traced]


def _check_scalar(value: Any) -> None:
    if not is_array(value):
        raise ShapeError(f"the function returned {describe_type(value)}; expected a floating scalar array")
    if tuple(value.shape) != () or not is_floating(value.dtype):
        received = f"the function returned {dtype_name(value.dtype)} of shape {tuple(value.shape)}"
        raise ShapeError(f"{received}; expected a floating scalar, e.g. take the mean or the sum")


# --- the backward pass ------------------------------------------------------------------------------------------------


def backward(
    xp: Any, tape: list[Record], seeds: dict[int, Any], leaves: int, on_leaf: Callable[[int, Any], object] | None = None
) -> list[Any]:
    """Return the cotangents of the first `leaves` records; None if no output depends on one.

    The tape is consumed, so memory is freed on the way. `seeds` are the cotangents of the outputs by tape position.
    Cotangents are summed to the shapes and cast to the dtypes of their primals here, so that rules need not. `on_leaf`
    gets the position and the cotangent of each leaf as soon as it is complete.
    """
    complete = {} if on_leaf is None else _leaves_by_first_use(tape, leaves)
    on_leaf = on_leaf or (lambda leaf, cotangent: None)
    cotangents: list[Any] = [None] * len(tape)
    for position, seed in seeds.items():
        cotangents[position] = seed
    add = base_function(xp, "operator_add")
    outputs: list[Any] = []  # cotangents of the outputs of a multi-output record, which precede the record itself
    while len(tape) > leaves:
        for leaf in complete.get(len(tape), ()):
            on_leaf(leaf, cotangents[leaf])
        pull, parents, residuals, shape, _ = tape.pop()
        g = cotangents.pop()
        if pull is None:
            outputs.append(g)
            continue
        if shape is None:
            g, outputs = outputs[::-1], []
            if all(item is None for item in g):
                continue
        elif g is None:
            continue
        new = list(pull(xp, g, residuals))
        for i, parent in zip(range(len(new)), parents, strict=True):
            if parent < 0 or new[i] is None:
                continue
            _, _, _, shape, dtype = tape[parent]
            if new[i].shape != shape or new[i].dtype != dtype:
                new[i] = unbroadcast(xp, new[i], shape, dtype)
            if cotangents[parent] is None:
                cotangents[parent] = new[i]
            elif add is operator.add and _may_overwrite(cotangents, parent):
                np.add(cotangents[parent], new[i], out=cotangents[parent])
            elif add is operator.add and _may_overwrite(new, i):
                cotangents[parent] = np.add(cotangents[parent], new[i], out=new[i])
            else:
                cotangents[parent] = add(cotangents[parent], new[i])
    for leaf in complete.get(leaves, ()):
        on_leaf(leaf, cotangents[leaf])
    return cotangents


def _may_overwrite(items: list[Any], index: int) -> bool:
    """Return whether a sum with an item may replace it: nothing else refers to it, and the sum has its layout.

    Rules may hand one array to two inputs.
    """
    is_own = type(items[index]) is np.ndarray and _num_references(items, index) == _OWN
    return bool(is_own and items[index].flags.c_contiguous and owns_memory(items[index]))


def _num_references(items: list[Any], index: int) -> int:
    item = items[index]
    return sys.getrefcount(item)


_OWN = _num_references([object()], 0)


def _leaves_by_first_use(tape: list[Record], leaves: int) -> dict[int, list[int]]:
    """Return the leaves by the position of the first record that uses them, or `leaves` if none does."""
    first = dict.fromkeys(range(leaves), leaves)
    for position in reversed(range(leaves, len(tape))):
        first.update((parent, position) for parent in tape[position][1] if 0 <= parent < leaves)
    positions = defaultdict(list)
    for leaf, position in first.items():
        positions[position].append(leaf)
    return positions


def unbroadcast(xp: Any, cotangent: Any, shape: tuple[int, ...], dtype: Any) -> Any:
    """Bring a cotangent to the shape and dtype of its primal: sum over the axes along which the primal was broadcast.

    A cotangent with fewer elements is broadcast instead: a rule may return a scalar for "the same everywhere".
    """
    leading = len(cotangent.shape) - len(shape)
    repeated = tuple(
        axis
        for axis, size in enumerate(cotangent.shape)
        if axis < leading or (shape[axis - leading] == 1 and size != 1)
    )
    if repeated:
        sum_dtype = accumulation_dtype(xp, cotangent.dtype)
        cotangent = xp.sum(cotangent, axis=repeated, keepdims=True, dtype=sum_dtype)
        cotangent = xp.reshape(cotangent, tuple(cotangent.shape)[max(leading, 0) :])
    if tuple(cotangent.shape) != shape:
        cotangent = xp.broadcast_to(cotangent, shape)
    if cotangent.dtype != dtype and is_complex(cotangent.dtype) and not is_complex(dtype):
        cotangent = xp.real(cotangent)  # of the product with a real change
    return cotangent if cotangent.dtype == dtype else xp.astype(cotangent, dtype)
