"""Functions of functions: value_and_grad, grad, vjp, checkpoint, stop_gradient."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from xformer.autodiff.namespace import DiffNamespace, active, new_trace
from xformer.autodiff.sweep import backward
from xformer.autodiff.tracer import Tracer
from xformer.errors import ShapeError
from xformer.namespace import array_namespace
from xformer.tree import flatten, is_array, map_arrays


def value_and_grad(function: Callable[..., Any], *, has_aux: bool = False) -> Callable[..., Any]:
    """Return a function that computes `function(tree, ...)` and its gradient with respect to `tree`.

    tree: the first argument: a Module, an array, or tuples, lists and dicts of them, in any library. The gradient
    has its structure, shapes and dtypes. `function` returns a scalar, or (scalar, anything) with `has_aux`; the
    result is (value, gradient), or ((value, anything), gradient).

    Raises ShapeError when the result is not a floating scalar.

    >>> import numpy as np
    >>> value_and_grad(lambda x: (x * x)[0])(np.asarray([3.0]))
    (np.float64(9.0), array([6.]))
    """

    @functools.wraps(function)
    def differentiated(tree: Any, *args: Any, **keywords: Any) -> Any:
        leaves, rebuild = flatten(tree)
        namespace = new_trace(leaves)
        try:
            traced = [namespace.leaf(leaf) for leaf in leaves]
            with active(namespace):
                result = function(rebuild(traced), *args, **keywords)
            value, extra = result if has_aux else (result, None)
            _check_scalar(value)
            lowered = _lower(namespace, (value, extra) if has_aux else value)
            return lowered, rebuild(_pull_back(namespace, [value], [None], traced))
        finally:
            namespace.close()

    return differentiated


def grad(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that computes only the gradient; see `value_and_grad`."""
    both = value_and_grad(function)

    @functools.wraps(function)
    def gradient(*args: Any, **keywords: Any) -> Any:
        return both(*args, **keywords)[1]

    return gradient


def vjp(function: Callable[..., Any], *primals: Any) -> tuple[Any, Callable[[Any], tuple[Any, ...]]]:
    """Compute `function(*primals)` and return it with a pullback.

    The pullback takes a cotangent (a tree like the result) and returns one cotangent for each primal. It consumes
    the trace, so it can be called once.
    """
    leaves, rebuild = flatten(primals)
    namespace = new_trace(leaves)
    traced = [namespace.leaf(leaf) for leaf in leaves]
    try:
        with active(namespace):
            result = function(*rebuild(traced))
        outputs = flatten(result)[0]
        lowered = _lower(namespace, result)
    except BaseException:
        namespace.close()
        raise

    def pullback(cotangent: Any) -> tuple[Any, ...]:
        if namespace.is_closed:
            raise RuntimeError("this pullback was used before; call vjp again for another cotangent")
        try:
            return rebuild(_pull_back(namespace, outputs, flatten(cotangent)[0], traced))  # type: ignore[no-any-return]
        finally:
            namespace.close()

    return lowered, pullback


def checkpoint(function: Callable[..., Any]) -> Callable[..., Any]:
    """Trade time for memory: keep only the inputs, and compute `function` again in the backward pass.

    (Rematerialisation; Chen et al., 2016, "Training Deep Nets with Sublinear Memory Cost".) Everything that is
    differentiated must come in as an argument (a Module is one). Random draws repeat, since an Rng is a value.
    """

    @functools.wraps(function)
    def remembered(*args: Any) -> Any:
        leaves, rebuild = flatten(args)
        namespace = array_namespace(*leaves) if leaves else None
        if not isinstance(namespace, DiffNamespace):
            return function(*args)
        parents = [leaf._index if _belongs(leaf, namespace) else -1 for leaf in leaves]
        values = [namespace.lower(leaf) for leaf in leaves]
        result = function(*rebuild(values))
        outputs, rebuild_result = flatten(result)
        if any(_belongs(output, namespace) for output in outputs):
            raise RuntimeError("checkpoint(f) closes over a traced array; pass it to f as an argument")
        if max(parents, default=-1) < 0:
            return map_arrays(namespace.lift, result)
        traced = namespace.record_several(outputs, _recompute, parents, (function, rebuild, values))
        return rebuild_result(traced)

    return remembered


def stop_gradient(x: Any) -> Any:
    """Return `x` as a constant: nothing is differentiated through it."""
    if type(x) is Tracer:
        return Tracer(stop_gradient(x._value), x._namespace, -1)
    return x


def _recompute(xp: Any, cotangents: Any, saved: Any, parents: Any) -> Any:
    """The VJP of a checkpointed function: trace it now, from its saved inputs, and sweep at once."""
    function, rebuild, values = saved
    namespace = new_trace(values)
    try:
        traced = [
            namespace.leaf(value) if parent >= 0 else namespace.lift(value)
            for value, parent in zip(values, parents, strict=True)
        ]
        with active(namespace):
            outputs = flatten(function(*rebuild(traced)))[0]
        return _pull_back(namespace, outputs, cotangents, traced)
    finally:
        namespace.close()


def _pull_back(namespace: DiffNamespace, outputs: list[Any], seeds: list[Any], traced: list[Any]) -> list[Any]:
    """Sweep from `outputs` to the traced inputs; inputs that nothing depends on get zeros."""
    xp = namespace.base
    by_position: dict[int, Any] = {}
    for output, seed in zip(outputs, seeds, strict=True):
        if _belongs(output, namespace) and output._index >= 0:
            cotangent = xp.ones_like(output._value) if seed is None else seed
            known = by_position.get(output._index)
            by_position[output._index] = cotangent if known is None else known + cotangent
    gradients = backward(namespace, by_position, [leaf._index for leaf in traced])
    return [
        xp.zeros_like(leaf._value) if gradient is None else gradient
        for leaf, gradient in zip(traced, gradients, strict=True)
    ]


def _belongs(value: Any, namespace: DiffNamespace) -> bool:
    return type(value) is Tracer and value._namespace is namespace


def _lower(namespace: DiffNamespace, result: Any) -> Any:
    return map_arrays(lambda x: namespace.unwrap(x) if type(x) is Tracer else x, result)


def _check_scalar(value: Any) -> None:
    if not is_array(value):
        raise ShapeError(f"the function returned a {type(value).__name__}; expected a floating scalar array")
    if tuple(value.shape) != ():
        raise ShapeError(
            f"the function returned shape {tuple(value.shape)}; expected a scalar, e.g. take the mean or the sum"
        )
