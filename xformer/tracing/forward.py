"""Forward mode: `jvp`, whose trace computes a tangent for each array right away and keeps no tape."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, Literal, overload

from xformer.backends import dtype_name, is_complex, is_inexact
from xformer.backends.array_types import R, S
from xformer.errors import ShapeError, describe_type
from xformer.tracing.arguments import check_function
from xformer.tracing.grad import as_argument, check_unwritten, flatten_arguments, grad, split_aux, unbroadcast, vjp_in
from xformer.tracing.namespace import GradTrace, base_for, tracing
from xformer.tracing.rule import RULES, Pull
from xformer.tracing.rules.elementwise import ELEMENTWISE
from xformer.tracing.tracer import Tracer
from xformer.tree import flatten, map_arrays


@functools.cache
def _scaling_pulls() -> set[Pull]:
    """Return those of functions whose formulas scale each element, which so are their own transposes."""
    rules = [RULES[name] for name in ELEMENTWISE & {*RULES} - {"abs", "conj", "imag", "real"}]
    return {pull for rule in rules for pull in (rule.pull_all, *(step.pull for step in rule.steps))}


class _Tangent(int):
    """The index of a traced array that has a tangent: 0, as -1 stands for a constant."""

    value: Any  # the tangent

    @classmethod
    def of(cls, value: Any) -> _Tangent:
        tangent = cls(0)
        tangent.value = value
        return tangent


class JvpTrace(GradTrace):
    """A `GradTrace` that pushes tangents forward at each record instead of writing it on the tape.

    A rule pulls a cotangent back, which is linear, so the derivative of that function is the one that pushes forward.
    """

    apply = GradTrace.apply_definition  # the derivatives of kernels cannot be differentiated

    def record(self, output: Any, pull: Pull | None, parents: Sequence[int], residuals: Any) -> Tracer:
        """Wrap an output with its tangent."""
        if pull in _scaling_pulls() and is_inexact(output.dtype):
            tangents = [self._scaled(output, pull, residuals, i, parent) for i, parent in enumerate(parents)]
            return Tracer(output, self, _Tangent.of(functools.reduce(operator.add, tangents)))
        (traced,) = self._push([output], lambda xp, g: pull(xp, g[0], residuals), parents)  # type: ignore[misc]
        return traced

    def record_outputs(
        self, outputs: Sequence[Any], pull: Pull, parents: Sequence[int], residuals: Any
    ) -> tuple[Tracer, ...]:
        """Wrap several outputs with their tangents."""
        return tuple(self._push(outputs, lambda xp, g: pull(xp, g, residuals), parents))

    def tangent(self, x: Any) -> Any:
        """Return the tangent of an array: zeros for a constant, None for integers and booleans."""
        index = self.position(x)
        if isinstance(index, _Tangent):
            return index.value
        return self.base.zeros_like(self.unwrap(x)) if is_inexact(x.dtype) else None

    def _scaled(self, output: Any, pull: Pull, residuals: Any, position: int, parent: Any) -> Any:
        """Return the part of the tangent of an elementwise output that comes from one input."""
        xp, tangent = self.base, parent.value
        tangent = tangent if tangent.dtype == output.dtype else xp.astype(tangent, output.dtype)
        if tuple(tangent.shape) != tuple(output.shape):
            tangent = xp.broadcast_to(tangent, tuple(output.shape))
        scaled = pull(xp, tangent, residuals)[position]
        return scaled if scaled.dtype == output.dtype else xp.astype(scaled, output.dtype)

    def _push(self, outputs: Sequence[Any], pull: Callable[[Any, Any], Any], parents: Sequence[Any]) -> list[Tracer]:
        places = [i for i, y in enumerate(outputs) if is_inexact(y.dtype)]
        used: list[Any] = []

        def pulled(seeds: Any) -> list[Any]:
            given: list[Any] = [None] * len(outputs)
            for place, seed in zip(places, seeds, strict=True):
                given[place] = seed
            xp = seeds[0]._namespace
            results = []
            for parent, g in zip(parents, pull(xp, given), strict=True):
                if parent >= 0 and g is not None:
                    used.append(parent.value)
                    results.append(unbroadcast(xp, g, tuple(parent.value.shape), parent.value.dtype))
            return results

        tangents: list[Any] = [None] * len(outputs)
        if places:
            _, push = vjp_in(self.base, pulled, [self.base.ones_like(outputs[i]) for i in places])
            for place, tangent in zip(places, push(used), strict=True):
                tangents[place] = tangent
        return [Tracer(y, self, -1 if t is None else _Tangent.of(t)) for y, t in zip(outputs, tangents, strict=True)]


@overload
def jvp(
    function: Callable[..., R], primals: Sequence[Any], tangents: Sequence[Any], has_aux: Literal[False] = False
) -> tuple[R, R]: ...
@overload
def jvp(
    function: Callable[..., tuple[R, S]], primals: Sequence[Any], tangents: Sequence[Any], has_aux: Literal[True]
) -> tuple[R, R, S]: ...
def jvp(function: Callable[..., Any], primals: Sequence[Any], tangents: Sequence[Any], has_aux: bool = False) -> Any:
    """Compute `function(*primals)` and its derivative along `tangents`, in one forward pass.

    Args:
        function: Function of arrays or trees of arrays.
        primals: Its arguments, a tuple or list.
        tangents: A tangent for each of them, with the same structure and shapes, and None for integer and boolean
            arrays. They are cast to the dtypes of the primals.
        has_aux: Whether `function` returns (output, auxiliary output).

    Returns:
        The output and its tangent, a tree like the output with None for integer and boolean arrays; and the auxiliary
        output with `has_aux`.

    Raises:
        ShapeError: If the primals have no floating array, or the tangents are not like them.

    Examples:
        >>> jvp(lambda x: x * x, (3.0,), (1.0,))
        (np.float64(9.0), np.float64(6.0))
    """
    check_function("jvp", function)
    _check_tuples("jvp", primals, tangents)
    leaves, rebuild = flatten_arguments("jvp", primals)
    expected = [x for x in leaves if is_inexact(x.dtype)]
    given = flatten(tuple(map(as_argument, tangents)))[0]
    seeds = [v for v in given if is_inexact(v.dtype)]
    shapes = [tuple(x.shape) for x in expected]
    if not shapes or shapes != [tuple(v.shape) for v in seeds] or any(map(_is_more_complex, seeds, expected)):
        found = [f"{dtype_name(v.dtype)} {tuple(v.shape)}" for v in given] or [*map(describe_type, tangents)]
        raise ShapeError(f"the tangents are {found}; expected floating arrays of the shapes of the primals, {shapes}")
    with tracing(base_for([*leaves, *seeds]), JvpTrace) as trace:
        remaining = iter(trace.unwrap([trace.base.astype(v, x.dtype) for v, x in zip(seeds, expected, strict=True)]))
        traced = [
            Tracer(trace.unwrap(x), trace, _Tangent.of(next(remaining)) if is_inexact(x.dtype) else -1) for x in leaves
        ]
        values = [x._value for x in traced]
        result = function(*rebuild(traced))
        check_unwritten(traced, values)
        result, aux = split_aux(result) if has_aux else (result, None)
        output, aux = map_arrays(trace.unwrap, (result, aux))
        results, rebuild = flatten(result)
        tangent = rebuild(list(map(trace.tangent, results)), keep=False)
    return (output, tangent, aux) if has_aux else (output, tangent)


def _check_tuples(function: str, primals: Any, tangents: Any) -> None:
    for name, value in (("primals", primals), ("tangents", tangents)):
        if not isinstance(value, tuple | list):
            raise ShapeError(f"{function} got {name} of type {type(value).__name__}; expected a tuple, as in (x,)")


def _is_more_complex(tangent: Any, primal: Any) -> bool:
    return is_complex(tangent.dtype) > is_complex(primal.dtype)


def hvp(function: Callable[..., Any], primals: Sequence[Any], tangents: Sequence[Any]) -> Any:
    """Compute the product of the Hessian of a scalar function and a vector, by forward over reverse mode.

    It takes as long as a few gradients, and the Hessian is never computed.

    Args:
        function: Function that returns a floating-point scalar.
        primals: Its arguments, a tuple or list, all of which are differentiated.
        tangents: The vector, as for `jvp`.

    Returns:
        The derivative of the gradient along the tangents: a tree like the argument, or a tuple of them for several.

    Examples:
        >>> hvp(lambda x: x**3, (2.0,), (1.0,))
        np.float64(12.0)
    """
    check_function("hvp", function)
    _check_tuples("hvp", primals, tangents)
    argnums = 0 if len(primals) == 1 else range(len(primals))
    return jvp(grad(function, argnums), primals, tangents)[1]
