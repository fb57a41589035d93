"""Optimizers: `state = optimizer.init(model)`, then `model, state = optimizer.update(...)` in each step.

Parameters are the floating arrays of a model; all other arrays stay as they are. A state is a NamedTuple of the number
of updates and of trees like the model, in which a leaf is None where the optimizer keeps no statistic. Checkpoints rely
on nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np

from xformer.backends import Array, assign
from xformer.backends.array_types import T
from xformer.config import Config, check_number, option
from xformer.errors import ConfigError, ShapeError, add_absent_methods
from xformer.ops.optimizers import adafactor, adam, muon, sgd, zero_factors, zero_moment
from xformer.threads import blas_threads, parallel_map
from xformer.training.data_parallel import is_numpy
from xformer.tree import Module, check_same_count, flatten, flatten_parameters, is_array

Scale = Array | None  # a factor of gradients


class Optimizer(Protocol):
    """An optimizer, as `train_step` and `fit` use it."""

    def init(self, model: Any) -> Any:
        """Return the state before the first update."""

    def update(
        self, model: T, grads: Any, state: Any, learning_rate: float, grad_scale: Scale = None, *, donate: bool = False
    ) -> tuple[T, Any]:
        """Make one update.

        Args:
            model: The model, or any tree of arrays.
            grads: A tree of the same structure; arrays that are no parameters are ignored, and may be None.
            state: What `init` or the last update returned.
            learning_rate: Step size.
            grad_scale: A scalar array that multiplies the gradients; NaN leaves every array as it is and only counts
                the update, so clipping and overflow checks need no host synchronization.
            donate: Reuse the memory of `model` and `state` where the backend can; they must not be used afterwards.

        Returns:
            The new model and state; new arrays unless `donate` is set.
        """


# A tuple for each parameter: itself, its gradient, and its statistics in the order of the state.
Rows = Sequence[Any]


class _Optimizer(Config):
    """Base class: the hyperparameters, and what all updates have in common."""

    _usage = "pass the learning rate to fit or train_step"
    _hints: ClassVar = dict.fromkeys(("lr", "learning_rate"), _usage)
    _state: ClassVar[Any]  # class of the state

    def init(self, model: Any) -> Any:
        """Return the state before the first update.

        Raises:
            ConfigError: If two parameters are the same array, which an update would replace by two different arrays.
        """
        names: dict[int, Any] = {}
        is_module = isinstance(model, Module)
        named = model.named_trainable_parameters() if is_module else enumerate(flatten_parameters(model)[0])
        for name, array in named:
            if not isinstance(array, np.generic) and (other := names.setdefault(id(array), name)) != name:
                problem = f"the parameters {other} and {name} are the same array, which an update would replace by two"
                hint = "keep a shared module or array in one field, and use it in several places of __call__"
                raise ConfigError(f"{problem}; {hint}")
        leaves, rebuild = flatten_parameters(model)
        columns = _columns([self._zeros(leaf) for leaf in leaves], len(self._state._fields) - 1)
        return self._state(0, *(rebuild(column, keep=False) for column in columns))

    def _keeps(self, parameter: Array) -> tuple[bool, ...]:
        """Return which statistics are kept for a parameter; all by default."""
        return (True,) * (len(self._state._fields) - 1)

    def _zeros(self, parameter: Array) -> tuple[Any, ...]:
        """Return the statistics of a parameter before the first update, None where none is kept."""
        return tuple(zero_moment(parameter) if keeps else None for keeps in self._keeps(parameter))

    def update(
        self, model: T, grads: Any, state: Any, learning_rate: float, grad_scale: Scale = None, *, donate: bool = False
    ) -> tuple[T, Any]:
        """Make one update; see `Optimizer.update`."""
        leaves, rebuild = flatten_parameters(model)
        gradients = flatten_parameters(grads)[0]
        _check_shapes("gradient", leaves, gradients)
        if not isinstance(state, self._state):
            kind, expected = type(state).__name__, self._state.__name__
            raise ConfigError(f"state is of {kind}; expected {expected}, from init(model) or the last update")
        step: Any = state.step
        if not is_array(learning_rate):
            check_number("learning_rate", learning_rate)
        step = assign(step, step + 1) if donate and is_array(step) else step + 1
        trees = [flatten(tree) for tree in state[1:]]
        columns = [
            arrays if len(arrays) == len(leaves) else self._spread(i, arrays, leaves)
            for i, (arrays, _) in enumerate(trees)
        ]
        rows = list(zip(leaves, gradients, *columns, strict=True))
        updated = self._update(rows, step, learning_rate, grad_scale, donate)
        parameters, *columns = _columns(updated, len(state))
        new = (build([x for x in column if x is not None]) for (_, build), column in zip(trees, columns, strict=True))
        return rebuild(parameters), self._state(step, *new)

    def _spread(self, number: int, arrays: Sequence[Array], parameters: Sequence[Array]) -> Sequence[Any]:
        """Return a statistic of each parameter, None where none is kept."""
        keeps, values = [self._keeps(parameter)[number] for parameter in parameters], iter(arrays)
        check_same_count([keep for keep in keeps if keep], arrays)
        return [next(values) if keep else None for keep in keeps]

    def _update(self, rows: Rows, step: Any, learning_rate: float, grad_scale: Scale, donate: bool) -> Rows:
        """Return the new parameter and statistics of each row; the update is number `step`, counted from 1."""
        raise NotImplementedError

    def _decays(self, rows: Rows) -> list[float]:
        """Return the weight decay of each parameter: that of the optimizer for two or more axes, or for all."""
        rate, everywhere = getattr(self, "weight_decay", 0.0), getattr(self, "decay_all", False)
        return [rate if everywhere or len(row[0].shape) > 1 else 0.0 for row in rows]


def _check_shapes(name: str, leaves: Sequence[Array], arrays: Sequence[Array]) -> None:
    """Raise ShapeError unless each parameter has one array of its shape."""
    check_same_count(leaves, arrays)
    for leaf, x in zip(leaves, arrays, strict=True):
        if leaf.shape != x.shape:
            expected = f"expected that of its parameter, {tuple(leaf.shape)}"
            raise ShapeError(f"a {name} has shape {tuple(x.shape)}; {expected}")


add_absent_methods(
    _Optimizer,
    dict.fromkeys(("state_dict", "step", "zero_grad"), "use xformer.fit, or train_step in a loop of your own"),
)


class AdamState(NamedTuple):
    """Number of updates, and running means of the gradients and of their squares (trees like the model)."""

    step: int
    exp_avg: Any
    exp_avg_sq: Any


class Adam(_Optimizer):
    """Adam (Kingma and Ba, 2015), with the constants of the Transformer (Vaswani et al., 2017, section 5.3).

    Args:
        beta1: Decay rate of the mean of the gradients.
        beta2: Decay rate of the mean of the squared gradients.
        epsilon: Added to the denominator.
    """

    _state = AdamState

    beta1: float = option(default=0.9, at_least=0.0, below=1.0)
    beta2: float = option(default=0.98, at_least=0.0, below=1.0)
    epsilon: float = option(default=1e-9, at_least=0.0)

    def _update(self, rows: Rows, step: Any, learning_rate: float, grad_scale: Scale, donate: bool) -> Rows:
        options: Any = {"beta1": self.beta1, "beta2": self.beta2, "epsilon": self.epsilon, "grad_scale": grad_scale}
        options |= {"learning_rate": learning_rate, "donate": donate}
        return adam(rows, step=step, weight_decay=self._decays(rows), **options)


class AdamW(Adam):
    """Adam with decoupled weight decay (Loshchilov and Hutter, 2019).

    Each update also subtracts learning_rate * weight_decay times each parameter from it.

    Args:
        weight_decay: Weight decay.
        decay_all: Decay every parameter; by default those of two or more axes: weights and embeddings, no biases.
    """

    weight_decay: float = option(default=0.01, at_least=0.0)
    decay_all: bool = option(default=False)


class Muon(AdamW):
    """Muon (Jordan et al., 2024) for weights, AdamW for all other parameters.

    An update of a weight is its momentum with all singular values near 1, so rare directions change as much as frequent
    ones. Muon usually needs far fewer updates than Adam; each takes longer. Updates are as large as those of AdamW (Liu
    et al., 2025, section 2.2), so the learning rate and the weight decay of AdamW fit.

    Weights are the matrices of which one side is at most `max_aspect_ratio` times the other. The embeddings and output
    layers of usual vocabularies are longer.

    Args:
        momentum: Decay rate of the momentum of weights.
        num_iterations: Newton-Schulz iterations of an update.
        max_aspect_ratio: Largest ratio of the sides of a weight.
    """

    momentum: float = option(default=0.95, at_least=0.0, below=1.0)
    num_iterations: int = option(default=5, at_least=1)
    max_aspect_ratio: float = option(default=8.0, at_least=1.0)

    def _keeps(self, parameter: Array) -> tuple[bool, ...]:
        shape = parameter.shape
        is_weight = len(shape) == 2 and 0 < max(shape) <= self.max_aspect_ratio * min(shape)
        return True, not is_weight

    def _update(self, rows: Rows, step: Any, learning_rate: float, grad_scale: Scale, donate: bool) -> Rows:
        _check_shapes("mean of gradients", [row[0] for row in rows], [row[2] for row in rows])
        weights, others = [row for row in rows if row[3] is None], [row for row in rows if row[3] is not None]

        options: Any = {"learning_rate": learning_rate, "grad_scale": grad_scale}
        options |= {name: getattr(self, name) for name in ("momentum", "weight_decay", "num_iterations")}

        def update_weight(row: tuple[Any, ...]) -> tuple[Any, ...]:
            return *muon(*row[:3], **options), None

        if weights and is_numpy(weights[0]):
            with blas_threads(1):
                updated = parallel_map(update_weight, weights)
        else:
            updated = list(map(update_weight, weights))
        of_weights, of_others = iter(updated), iter(super()._update(others, step, learning_rate, grad_scale, donate))
        return [next(of_weights if row[3] is None else of_others) for row in rows]


class SGDState(NamedTuple):
    """Number of updates, and the velocities (a tree like the model; None without momentum)."""

    step: int
    velocity: Any


class SGD(_Optimizer):
    """Stochastic gradient descent with momentum, as torch.optim.SGD (without dampening and weight decay).

    Args:
        momentum: Decay rate of the velocity; 0 is plain gradient descent.
        nesterov: Use Nesterov's momentum (Sutskever et al., 2013).
    """

    _state = SGDState

    momentum: float = option(default=0.9, at_least=0.0, below=1.0)
    nesterov: bool = option(default=False)

    def init(self, model: Any) -> SGDState:
        """Return the state before the first update."""
        state: SGDState = super().init(model)
        return state if self.momentum else state._replace(velocity=None)

    def _keeps(self, parameter: Array) -> tuple[bool, ...]:
        return (bool(self.momentum),)

    def _update(self, rows: Rows, step: Any, learning_rate: float, grad_scale: Scale, donate: bool) -> Rows:
        if self.momentum:
            _check_shapes("velocity", [row[0] for row in rows], [row[2] for row in rows])
        options: Any = {"learning_rate": learning_rate, "grad_scale": grad_scale}
        options |= {"momentum": self.momentum, "nesterov": self.nesterov}
        return [sgd(*row, **options) for row in rows]


class AdafactorState(NamedTuple):
    """Number of updates, and running means of the squared gradients (trees like the model).

    `row` and `column` hold the means of the rows and columns of every matrix, `variance` those of the elements of all
    other parameters.
    """

    step: int
    row: Any
    column: Any
    variance: Any


class Adafactor(_Optimizer):
    """Adafactor (Shazeer and Stern, 2018), as torch.optim.Adafactor.

    The second moment of a matrix is kept as one mean for each row and each column, so the state is far smaller than
    Adam's. The learning rate is relative to the size of each parameter, as in the paper; 0.01 is usual.

    Args:
        beta2_decay: At update t the decay rate of the running means is 1 - t ** beta2_decay.
        epsilon: Lower bound of the root of the second moment; default the precision of the dtype.
        min_scale: Lower bound of the size of a parameter.
        clip_threshold: Largest root mean square of an update before it is scaled.
        scale_parameter: Make the learning rate relative to the size of each parameter.
        relative_step: Limit the learning rate to 1 / sqrt(t).
        weight_decay: Weight decay, as in AdamW.
        decay_all: Decay every parameter, as in AdamW.
    """

    _state = AdafactorState

    beta2_decay: float = option(default=-0.8)
    epsilon: float | None = option(default=None, at_least=0.0)
    min_scale: float = option(default=1e-3, at_least=0.0)
    clip_threshold: float = option(default=1.0, at_least=0.0)
    scale_parameter: bool = option(default=True)
    relative_step: bool = option(default=True)
    weight_decay: float = option(default=0.0, at_least=0.0)
    decay_all: bool = option(default=False)

    def _keeps(self, parameter: Array) -> tuple[bool, ...]:
        is_matrix = len(parameter.shape) > 1
        return is_matrix, is_matrix, not is_matrix

    def _zeros(self, parameter: Array) -> tuple[Any, ...]:
        return zero_factors(parameter)

    def _update(self, rows: Rows, step: Any, learning_rate: float, grad_scale: Scale, donate: bool) -> Rows:
        options: Any = {
            "grad_scale": grad_scale,
            "step_size": min(learning_rate, 1.0 / math.sqrt(step)) if self.relative_step else learning_rate,
            "beta2": 1.0 - math.pow(step, self.beta2_decay),
            "epsilon": self.epsilon,
            "min_scale": self.min_scale if self.scale_parameter else None,
            "clip_threshold": self.clip_threshold,
        }
        return [
            adafactor(*row, **options, decay=1.0 - learning_rate * decay)
            for row, decay in zip(rows, self._decays(rows), strict=True)
        ]


def _columns(rows: Sequence[tuple[Any, ...]], count: int) -> list[Any]:
    """Transpose rows of `count` items; `rows` may be empty."""
    return list(zip(*rows, strict=True)) or [()] * count
