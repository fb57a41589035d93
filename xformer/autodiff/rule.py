"""How a derivative is written down: a formula whose parameter names say what it needs.

    define("multiply", lambda g, b: g * b, lambda g, a: g * a, inputs=2)
    define("exp", lambda g, y: g * y)
    define("sum", sum_vjp)          # def sum_vjp(xp, g, x_shape, *, axis=None, ...)

A formula maps the cotangent `g` of the output to the cotangent of one input. These names are filled in by the sweep:

    xp                the namespace to compute in (below the trace, so formulas can be differentiated again)
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
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

Formula = Callable[..., Any]


class Record(NamedTuple):
    """One step of a trace. `pull` maps the output's cotangent to cotangents of `parents` (tape positions, -1: none)."""

    pull: Callable[[Any, Any, Any, Sequence[int]], Any] | None
    parents: Sequence[int]
    saved: Any
    shape: tuple[int, ...]
    dtype: Any


class _Step(NamedTuple):
    """A compiled formula: which of (xp, g, *saved) it takes, in the order of its parameters."""

    formula: Formula
    arguments: tuple[int, ...]


class Rule:
    """The derivative of one function: a formula for each differentiable input.

    positions: where those inputs stand among the call's positional arguments.
    """

    def __init__(self, name: str, formulas: Sequence[Formula], positions: Sequence[int]) -> None:
        self.name = name
        self.positions = tuple(positions)
        self._inputs = ("x",) if len(formulas) == 1 else ("a", "b")
        wanted = [self._wanted(formula) for formula in formulas]
        slots = sorted({name for names in wanted for name in names} - {"xp", "g"})
        order = {name: index for index, name in enumerate(("xp", "g", *slots))}
        self.steps = tuple(
            _Step(formula, tuple(order[name] for name in names))
            for formula, names in zip(formulas, wanted, strict=True)
        )
        # For each slot: what it holds, and which inputs must be tracked for it to be worth keeping.
        self._slots = tuple((name, tuple(i for i, names in enumerate(wanted) if name in names)) for name in slots)

    def _wanted(self, formula: Formula) -> tuple[str, ...]:
        fillable = {"xp", "g", "y", *self._inputs, *(f"{name}_shape" for name in self._inputs)}
        return tuple(name for name in inspect.signature(formula).parameters if name in fillable)

    def save(self, inputs: Sequence[Any], output: Any, parents: Sequence[int]) -> tuple[Any, ...]:
        """Keep what the formulas of the tracked inputs will need, and nothing else."""
        kept = []
        for name, users in self._slots:
            if not any(parents[user] >= 0 for user in users):
                kept.append(None)
            elif name == "y":
                kept.append(output)
            elif name.endswith("_shape"):
                kept.append(tuple(inputs[self._inputs.index(name[0])].shape))
            else:
                kept.append(inputs[self._inputs.index(name)])
        return tuple(kept)

    def pull(self, xp: Any, g: Any, saved: Any, parents: Sequence[int]) -> Iterator[Any]:
        """Yield the cotangent of every input; None for those that are constants."""
        kept, static, keywords = saved
        pool = (xp, g, *kept)
        for parent, step in zip(parents, self.steps, strict=True):
            if parent < 0:
                yield None
            else:
                yield step.formula(*[pool[index] for index in step.arguments], *static, **keywords)


RULES: dict[str, Rule] = {}
SEQUENCE_RULES: dict[str, Formula] = {}
COMPOSITES: dict[str, Formula] = {}
NOT_DIFFERENTIABLE: set[str] = set()


def define(name: str, *formulas: Formula, positions: Sequence[int] | None = None) -> None:
    """Register the derivative of the function `name`: one formula for each differentiable input."""
    RULES[name] = Rule(name, formulas, positions or range(len(formulas)))


def define_sequence(name: str) -> Callable[[Formula], Formula]:
    """Register the derivative of a function of a list of arrays; the formula returns one cotangent for each."""

    def register(formula: Formula) -> Formula:
        SEQUENCE_RULES[name] = formula
        return formula

    return register


def composite(name: str) -> Callable[[Formula], Formula]:
    """Register a function `f(xp, ...)` written in other functions of `xp`, which carry the derivative."""

    def register(function: Formula) -> Formula:
        COMPOSITES[name] = function
        return function

    return register


def not_differentiable(*names: str) -> None:
    """Register functions whose result is locally constant, or made of integers, booleans or no inputs at all."""
    NOT_DIFFERENTIABLE.update(names)
