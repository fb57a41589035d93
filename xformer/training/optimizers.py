"""Optimizers: `state = optimizer.init(model)`, then `model, state = optimizer.update(...)` a step.

An update counts the gradients `factor` times, a scalar array (None is no factor). Where that is NaN the arrays stay as
they are, and only the number of updates goes on: a GPU so clips, and keeps out what is not finite, without the host,
which goes on with the old state when it finds out.

A state is a NamedTuple: the number of updates made so far, and trees like the model; where a tree has nothing to say
of a parameter its leaf is None. That is all that saving and restoring it (run_directory.py) relies on.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from xformer.backends import Array
from xformer.errors import ConfigError
from xformer.ops.adafactor import adafactor, zero_factors
from xformer.ops.adam import adam, zero_moment
from xformer.ops.sgd import sgd
from xformer.tree import flatten, map_arrays

OPTIMIZERS = ("adam", "adamw", "adafactor", "sgd")


class Optimizer(Protocol):
    """What training asks of an optimizer."""

    def init(self, model: Any) -> Any:
        """The state before the first update."""

    def update(
        self, model: Any, gradients: Any, state: Any, learning_rate: float, factor: Array | None = None
    ) -> tuple[Any, Any]:
        """Make one update; `model` and `state` are consumed (buffers may be written where the library allows)."""


class AdamState(NamedTuple):
    """Updates made so far, and the running means of gradients and squared gradients (trees like the model)."""

    step: int
    first: Any
    second: Any


@dataclass(frozen=True)
class Adam:
    """Adam (Kingma and Ba, 2015), with the Transformer's constants (Vaswani et al., 2017, section 5.3)."""

    beta1: float = 0.9
    beta2: float = 0.98
    epsilon: float = 1e-9

    def __post_init__(self) -> None:
        _check(self, shares=("beta1", "beta2"), sizes=("epsilon", "weight_decay"))

    def init(self, model: Any) -> AdamState:
        """The state before the first update: all moments zero."""
        return AdamState(0, map_arrays(zero_moment, model), map_arrays(zero_moment, model))

    def update(
        self, model: Any, gradients: Any, state: AdamState, learning_rate: float, factor: Array | None = None
    ) -> tuple[Any, AdamState]:
        """Make one update; `model` and `state` are consumed (buffers may be written where the library allows)."""
        leaves, rebuild = flatten(model)
        (first, with_first), (second, with_second) = flatten(state.first), flatten(state.second)
        updated = adam(
            list(zip(leaves, flatten(gradients)[0], first, second, strict=True)),
            learning_rate=learning_rate,
            step=state.step + 1,
            beta1=self.beta1,
            beta2=self.beta2,
            epsilon=self.epsilon,
            weight_decay=[self.decay(leaf) for leaf in leaves],
            factor=factor,
        )
        parameters, first, second = _columns(updated, 3)
        return rebuild(parameters), AdamState(state.step + 1, with_first(first), with_second(second))

    def decay(self, parameter: Array) -> float:
        """The weight decay of a parameter: none."""
        return 0.0


@dataclass(frozen=True)
class AdamW(Adam):
    """Adam with decoupled weight decay (Loshchilov and Hutter, 2019): each update also shrinks the parameters, by
    learning_rate * weight_decay of themselves.

    decay_all: shrink every parameter; by default only those of two or more axes, which are the weights of linear
    layers and the embedding tables, and neither biases nor the parameters of norms.
    """

    weight_decay: float = 0.01
    decay_all: bool = False

    def decay(self, parameter: Array) -> float:
        """The weight decay of a parameter."""
        return _decay(parameter, self.weight_decay, self.decay_all)


class SGDState(NamedTuple):
    """Updates made so far, and the velocity of each parameter (a tree like the model; None without momentum)."""

    step: int
    velocity: Any


@dataclass(frozen=True)
class SGD:
    """Stochastic gradient descent with momentum, as torch.optim.SGD has it (without dampening and weight decay).

    nesterov: take the gradient's momentum where the velocity is going to be (Sutskever et al., 2013).
    """

    momentum: float = 0.9
    nesterov: bool = False

    def __post_init__(self) -> None:
        _check(self, shares=("momentum",))

    def init(self, model: Any) -> SGDState:
        """The state before the first update: at rest."""
        return SGDState(0, map_arrays(zero_moment, model) if self.momentum else None)

    def update(
        self, model: Any, gradients: Any, state: SGDState, learning_rate: float, factor: Array | None = None
    ) -> tuple[Any, SGDState]:
        """Make one update; `model` and `state` are consumed (buffers may be written where the library allows)."""
        leaves, rebuild = flatten(model)
        velocities = [None] * len(leaves) if state.velocity is None else flatten(state.velocity)[0]
        settings: Any = {"learning_rate": learning_rate, "momentum": self.momentum, "nesterov": self.nesterov}
        rows = zip(leaves, flatten(gradients)[0], velocities, strict=True)
        parameters, velocity = _columns([sgd(*row, factor, **settings) for row in rows], 2)
        return rebuild(parameters), SGDState(state.step + 1, None if state.velocity is None else rebuild(velocity))


class AdafactorState(NamedTuple):
    """Updates made so far, and the running means of squared gradients, over trees like the model: the rows' and the
    columns' of every matrix, each element's of all other parameters."""

    step: int
    row: Any
    column: Any
    second: Any


@dataclass(frozen=True)
class Adafactor:
    """Adafactor (Shazeer and Stern, 2018), as torch.optim.Adafactor has it: the second moment of a matrix is kept as
    one mean a row and one a column, so the state is far smaller than Adam's.

    The learning rate is relative to the size of each parameter, as in the paper; 0.01 is usual.

    beta2_decay: at update t the running means forget all but 1 - t ** beta2_decay
    epsilon: lower bound of the second moment's root (None: the dtype's precision)
    min_scale: the size that a parameter counts as at least
    threshold: the root mean square that an update may have before it is scaled
    scale_parameter: False makes the learning rate absolute
    relative_step: the learning rate is at most 1 / sqrt(t); False leaves it to the schedule alone
    weight_decay, decay_all: as AdamW's
    """

    beta2_decay: float = -0.8
    epsilon: float | None = None
    min_scale: float = 1e-3
    threshold: float = 1.0
    scale_parameter: bool = True
    relative_step: bool = True
    weight_decay: float = 0.0
    decay_all: bool = False

    def __post_init__(self) -> None:
        _check(self, sizes=("epsilon", "min_scale", "threshold", "weight_decay"))

    def init(self, model: Any) -> AdafactorState:
        """The state before the first update: all means zero."""
        leaves, rebuild = flatten(model)
        return AdafactorState(0, *map(rebuild, _columns([zero_factors(leaf) for leaf in leaves], 3)))

    def update(
        self, model: Any, gradients: Any, state: AdafactorState, learning_rate: float, factor: Array | None = None
    ) -> tuple[Any, AdafactorState]:
        """Make one update; `model` and `state` are consumed (buffers may be written where the library allows)."""
        leaves, rebuild = flatten(model)
        step = state.step + 1
        settings = {
            "step_size": min(learning_rate, 1.0 / math.sqrt(step)) if self.relative_step else learning_rate,
            "beta2": 1.0 - math.pow(step, self.beta2_decay),
            "epsilon": self.epsilon,
            "min_scale": self.min_scale if self.scale_parameter else None,
            "threshold": self.threshold,
        }
        updated = [
            adafactor(
                leaf,
                gradient,
                *factors,
                factor,
                **settings,
                keep=1.0 - learning_rate * _decay(leaf, self.weight_decay, self.decay_all),
            )
            for leaf, gradient, factors in zip(leaves, flatten(gradients)[0], _factors(leaves, state), strict=True)
        ]
        parameters, *moments = _columns(updated, 4)
        return rebuild(parameters), AdafactorState(step, *map(rebuild, moments))


def _check(optimizer: Any, shares: Sequence[str] = (), sizes: Sequence[str] = ()) -> None:
    """Raise ConfigError for settings, of those that there are and not None, that are no shares or no sizes."""
    for names, most, words in ((shares, 1.0, "a number in [0, 1)"), (sizes, math.inf, "a finite number of at least 0")):
        for name in names:
            value = getattr(optimizer, name, None)
            if value is not None and not (isinstance(value, int | float) and 0.0 <= value < most):
                raise ConfigError(f"{type(optimizer).__name__}: {name} is {value!r}; expected {words}")


def _factors(leaves: Sequence[Array], state: AdafactorState) -> Iterator[tuple[Any, Any, Any]]:
    """What the state has of each parameter; flattening a tree leaves out leaves that are None."""
    row, column, second = (iter(flatten(tree)[0]) for tree in (state.row, state.column, state.second))
    for leaf in leaves:
        yield (None, None, next(second)) if len(leaf.shape) < 2 else (next(row), next(column), None)


def _decay(parameter: Array, weight_decay: float, decay_all: bool) -> float:
    return weight_decay if decay_all or len(parameter.shape) > 1 else 0.0


def _columns(rows: Sequence[tuple[Any, ...]], count: int) -> list[list[Any]]:
    """Turn rows of `count` items into columns, also when there are none."""
    return [[row[place] for row in rows] for place in range(count)]


def make_optimizer(
    name: str, *, beta1: float, beta2: float, epsilon: float, momentum: float, weight_decay: float | None
) -> Optimizer:
    """Return the optimizer of that name with those of the settings that it has; weight_decay None: its own default.

    Raises ConfigError for an unknown name, and for weight decay with an optimizer that has none.
    """
    if name not in OPTIMIZERS:
        raise ConfigError(f"optimizer is {name!r}; expected one of {', '.join(map(repr, OPTIMIZERS))}")
    decay: dict[str, Any] = {} if weight_decay is None else {"weight_decay": weight_decay}
    if name == "adamw":
        return AdamW(beta1, beta2, epsilon, **decay)
    if name == "adafactor":
        return Adafactor(**decay)
    if weight_decay:
        raise ConfigError(f"weight_decay is {weight_decay}; optimizer {name!r} has none; choose 'adamw' or 'adafactor'")
    return Adam(beta1, beta2, epsilon) if name == "adam" else SGD(momentum)
