"""How a derivative is written down: a formula whose parameter names say what it needs.

    defvjp("multiply", lambda g, b: g * b, lambda g, a: g * a)
    defvjp("exp", lambda g, y: g * y)
    defvjp("sum", sum_vjp)          # def sum_vjp(xp, g, x_shape, *, axis=None, ...)

A formula maps the cotangent `g` of the output to the cotangent of one input. Its first parameters are, in this order:

    xp                the namespace to compute in (below the trace, so formulas can be differentiated again); optional
    g                 the cotangent of the output, of the output's shape and dtype
    x, or a and b     the differentiable inputs: only what some formula names is kept in memory
    y                 the output
    x_shape, a_shape, b_shape   their shapes

Every other parameter is a static argument of the call (axis, keepdims, indices, a condition). A formula may return a
cotangent broadcast against its input or of another float dtype: the sweep sums it to shape and casts it, once, for
all rules.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

Formula = Callable[..., Any]
Pull = Callable[[Any, Any, Any], Sequence[Any]]

# One step of a trace. A plain tuple, because one is made for every operation: (pull, parents, saved, shape, dtype).
#   pull(xp, g, saved)   returns a cotangent for each parent; None in place of `pull` where there is nothing to pull
#   parents              tape positions of the inputs; -1 is a constant
#   shape, dtype         of the output; None where the outputs are the next records on the tape
Record = tuple[Pull | None, Sequence[int], Any, Any, Any]


class Step(NamedTuple):
    """A compiled formula.

    keep(inputs and output) picks what the formula needs; pull(xp, g, (picked + static arguments, keywords)) calls it.
    """

    keep: Callable[[tuple[Any, ...]], tuple[Any, ...]]
    pull: Pull


class Rule:
    """The derivative of one function: a compiled formula for each differentiable input.

    positions: where those inputs stand among the call's positional arguments.
    """

    def __init__(self, formulas: Sequence[Formula], positions: Sequence[int]) -> None:
        inputs = ("x",) if len(formulas) == 1 else ("a", "b")
        self.positions = tuple(positions)
        self.steps = tuple(_compile(formula, inputs) for formula in formulas)
        self.pull_all = _pull_both(*self.steps) if len(formulas) == 2 else self.steps[0].pull

    def plan(self, parents: Sequence[int], pool: tuple[Any, ...], static: tuple[Any, ...], keywords: Any) -> Any:
        """Return (pull, tracked parents, what `pull` needs) for a call; `pool` is its inputs and its output."""
        if len(parents) == 1:
            ((keep, pull),) = self.steps
            return pull, parents, (keep(pool) + static, keywords)
        tracked = [i for i, parent in enumerate(parents) if parent >= 0]
        kept = [self.steps[i].keep(pool) + static for i in tracked]
        pull = self.pull_all if len(tracked) == len(self.steps) else self.steps[tracked[0]].pull
        return pull, [parents[i] for i in tracked], (*kept, keywords)


def _compile(formula: Formula, inputs: tuple[str, ...]) -> Step:
    fillable = {"y", *inputs, *(f"{name}_shape" for name in inputs)}
    names = list(inspect.signature(formula).parameters)
    keep = _picker([name for name in names if name in fillable], (*inputs, "y"))
    if names[0] == "xp":
        return Step(keep, lambda xp, g, saved: (formula(xp, g, *saved[0], **saved[1]),))
    return Step(keep, lambda xp, g, saved: (formula(g, *saved[0], **saved[1]),))


def _picker(names: list[str], pool: tuple[str, ...]) -> Callable[[tuple[Any, ...]], tuple[Any, ...]]:
    """Make the function that picks `names` from values that stand in the order of `pool`."""
    places = [(pool.index(name.removesuffix("_shape")), name.endswith("_shape")) for name in names]
    if any(is_shape for _, is_shape in places):
        return lambda values: tuple(
            [tuple(values[place].shape) if is_shape else values[place] for place, is_shape in places]
        )
    if len(places) > 1:
        return itemgetter(*(place for place, _ in places))
    start = places[0][0] if places else 0
    return itemgetter(slice(start, start + len(places)))  # a slice, so that one value, or none, is a tuple as well


def _pull_both(first: Step, second: Step) -> Pull:
    def pull(xp: Any, g: Any, saved: Any) -> Sequence[Any]:
        kept_first, kept_second, keywords = saved
        return (*first.pull(xp, g, (kept_first, keywords)), *second.pull(xp, g, (kept_second, keywords)))

    return pull


RULES: dict[str, Rule] = {}
SEQUENCE_RULES: dict[str, Formula] = {}
DECOMPOSITIONS: dict[str, Formula] = {}
NOT_DIFFERENTIABLE: set[str] = set()


def defvjp(name: str, *formulas: Formula, positions: Sequence[int] | None = None) -> None:
    """Register the derivative of the function `name`: one formula for each differentiable input (at most two)."""
    RULES[name] = Rule(formulas, positions or range(len(formulas)))


def defvjp_sequence(name: str) -> Callable[[Formula], Formula]:
    """Register the derivative of a function of a list of arrays; the formula returns one cotangent for each."""

    def register(formula: Formula) -> Formula:
        SEQUENCE_RULES[name] = formula
        return formula

    return register


def decomposition(name: str) -> Callable[[Formula], Formula]:
    """Register a function `f(xp, ...)` written in other functions of `xp`, which carry the derivative.

    It serves tracked arrays only; on constants the library's own function is called.
    """

    def register(function: Formula) -> Formula:
        DECOMPOSITIONS[name] = function
        return function

    return register


def not_differentiable(*names: str) -> None:
    """Register functions whose result is locally constant, or made of integers, booleans or no inputs at all."""
    NOT_DIFFERENTIABLE.update(names)
