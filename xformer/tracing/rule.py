"""Derivative rules: formulas whose parameter names state what they need.

    defvjp("multiply", lambda g, b: g * b, lambda g, a: g * a)
    defvjp("exp", lambda g, y: g * y)
    defvjp("sum", sum_vjp)          # def sum_vjp(xp, g, x_shape, *, axis=None, ...)

A formula maps the cotangent `g` of the output to the cotangent of one input. Its first parameters are, in this order:

    xp                the namespace to compute in (below the trace, so formulas can be differentiated again); optional
    g                 the cotangent of the output, of the output's shape and dtype
    x, or a and b     the differentiable inputs; only those that a formula names are kept in memory
    y                 the output
    x_shape, a_shape, b_shape   their shapes

Every other parameter is a static argument of the call (axis, keepdims, indices, a condition). A formula may return a
cotangent that is broadcast against its input or has another float dtype: `backward` sums and casts it for all rules.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

from xformer.tracing.tracer import OPERATORS_OF_NUMPY

Formula = Callable[..., Any]
Pull = Callable[[Any, Any, Any], Sequence[Any]]

# A record of a trace. A plain tuple, since each operation makes one: (pull, parents, residuals, shape, dtype).
#   pull(xp, g, residuals)   returns a cotangent for each parent; `pull` is None for leaves and further outputs
#   parents                  tape positions of the inputs; -1 is a constant
#   shape, dtype             of the output; None if the outputs are the next records on the tape
Record = tuple[Pull | None, Sequence[int], Any, Any, Any]


class Step(NamedTuple):
    """A compiled formula.

    Attributes:
        select: select(inputs and output) returns those that the formula needs.
        pull: pull(xp, g, (selected and static arguments, keywords)) calls the formula.
    """

    select: Callable[[tuple[Any, ...]], tuple[Any, ...]]
    pull: Pull


class Rule:
    """The derivative of one function: a compiled formula for each differentiable input.

    Attributes:
        positions: Positions of those inputs among the positional arguments.
        kept: Positions of the inputs whose values a formula needs.
    """

    def __init__(self, formulas: Sequence[Formula], positions: Sequence[int]) -> None:
        inputs = ("x",) if len(formulas) == 1 else ("a", "b")
        self.positions = tuple(positions)
        self.steps = tuple(_compile(formula, inputs) for formula in formulas)
        names = {name for formula in formulas for name in inspect.signature(formula).parameters}
        self.kept = {i for i, name in zip(self.positions, inputs, strict=True) if name in names}
        self.pull_all = _pull_both(*self.steps) if len(formulas) == 2 else self.steps[0].pull


def _compile(formula: Formula, inputs: tuple[str, ...]) -> Step:
    fillable = {"y", *inputs, *(f"{name}_shape" for name in inputs)}
    names = list(inspect.signature(formula).parameters)
    select = _selector([name for name in names if name in fillable], (*inputs, "y"))
    if names[0] == "xp":
        return Step(select, lambda xp, g, residuals: (formula(xp, g, *residuals[0], **residuals[1]),))
    return Step(select, lambda xp, g, residuals: (formula(g, *residuals[0], **residuals[1]),))


def _selector(names: list[str], pool: tuple[str, ...]) -> Callable[[tuple[Any, ...]], tuple[Any, ...]]:
    """Return a function that selects `names` from values in the order of `pool`."""
    indices = [(pool.index(name.removesuffix("_shape")), name.endswith("_shape")) for name in names]
    if any(is_shape for _, is_shape in indices):
        return lambda values: tuple(
            [tuple(values[index].shape) if is_shape else values[index] for index, is_shape in indices]
        )
    if len(indices) > 1:
        return itemgetter(*(index for index, _ in indices))
    start = indices[0][0] if indices else 0
    return itemgetter(slice(start, start + len(indices)))  # a slice, so that the result is always a tuple


def _pull_both(first: Step, second: Step) -> Pull:
    def pull(xp: Any, g: Any, residuals: Any) -> Sequence[Any]:
        residuals_first, residuals_second, keywords = residuals
        return (*first.pull(xp, g, (residuals_first, keywords)), *second.pull(xp, g, (residuals_second, keywords)))

    return pull


RULES: dict[str, Rule] = {}
SEQUENCE_RULES: dict[str, Formula] = {}
OUTPUT_RULES: dict[str, Formula] = {}
DECOMPOSITIONS: dict[str, Formula] = {}
NOT_DIFFERENTIABLE: set[str] = set()
# The function whose derivative each operator shares.
RULE_OF_OPERATOR = {"operator_abs": "abs"} | {f"operator_{name}": rule for rule, name in OPERATORS_OF_NUMPY.items()}
RULE_OF_OPERATOR |= {"operator_pow": "pow", "operator_neg": "negative", "operator_pos": "positive"}
RULE_OF_OPERATOR |= {name.replace("operator", "inplace"): rule for name, rule in RULE_OF_OPERATOR.items()}


def defvjp(name: str, *formulas: Formula, positions: Sequence[int] | None = None) -> None:
    """Register the derivative of a function of the standard.

    Args:
        name: Name of the function, e.g. "multiply".
        *formulas: One formula for each differentiable input, one or two; see the top of this module.
        positions: Positions of those inputs among the positional arguments; default the first ones.
    """
    RULES[name] = Rule(formulas, positions or range(len(formulas)))


def registrar(table: dict[str, Formula], *names: str) -> Callable[[Formula], Formula]:
    """Return a decorator that puts a function into a table under some names."""

    def register(function: Formula) -> Formula:
        table.update(dict.fromkeys(names, function))
        return function

    return register


def defvjp_sequence(name: str) -> Callable[[Formula], Formula]:
    """Return a decorator that registers the derivative of a function of a list of arrays.

    Args:
        name: Name of the function, e.g. "concat". The formula f(xp, g, shapes, **keywords) returns one cotangent for
            each array.
    """
    return registrar(SEQUENCE_RULES, name)


def defvjp_outputs(name: str) -> Callable[[Formula], Formula]:
    """Return a decorator that registers the derivative of a function of one array with several outputs.

    Args:
        name: Name of the function, e.g. "linalg.qr". The formula f(xp, g, x, outputs, **keywords) returns the cotangent
            of x; g is the list of the cotangents of the outputs, with zeros for unused ones.
    """
    return registrar(OUTPUT_RULES, name)


def decomposition(name: str) -> Callable[[Formula], Formula]:
    """Return a decorator that registers a function written in other, differentiable functions.

    It applies to tracked arrays; constants are passed to the library's own function.

    Args:
        name: Name of the function. The decomposition is called as f(xp, ...).
    """
    return registrar(DECOMPOSITIONS, name)


def not_differentiable(*names: str) -> None:
    """Register functions whose result is locally constant or does not depend on floating-point inputs.

    Args:
        *names: Names of the functions.
    """
    NOT_DIFFERENTIABLE.update(names)
