"""Optimizers: `state = optimizer.init(model)`, then `model, state = optimizer.update(...)` in each step.

Parameters are the floating arrays of a model; all other arrays stay as they are. A state is a NamedTuple of the number
of updates and of trees like the model, in which a leaf is None where the optimizer keeps no statistic. Checkpoints rely
on nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Real
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np

from xformer.backends import Array, assign
from xformer.config import Config, option
from xformer.errors import ConfigError, ShapeError, add_absent_methods
from xformer.ops.optimizers import adafactor, adam, muon, sgd, zero_factors, zero_moment
from xformer.threads import blas_threads, parallel_map
from xformer.training.data_parallel import is_numpy
from xformer.tree import Module, check_same_count, flatten, flatten_parameters, is_array, map_parameters


class Optimizer(Protocol):
    """An optimizer, as `train_step` and `fit` use it."""

    def init(self, model: Any) -> Any:
        """Return the state before the first update."""

    def update(
        self,
        model: Any,
        grads: Any,
        state: Any,
        learning_rate: float,
        grad_scale: Array | None = None,
        *,
        donate: bool = False,
    ) -> tuple[Any, Any]:
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


class Settings(NamedTuple):
    """The arguments of an update besides the trees."""

    learning_rate: float
    grad_scale: Array | None
    donate: bool


Slots = list[tuple[Any, Any]]
"""The parameters and their gradients."""


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
                raise ConfigError(
                    f"the parameters {other} and {name} are the same array, which an update would replace by two; keep "
                    "a shared module or array in one field, and use it in several places of __call__"
                )
        return self._init(model)

    def _init(self, model: Any) -> Any:
        """Return the state before the first update."""
        raise NotImplementedError

    def update(
        self,
        model: Any,
        grads: Any,
        state: Any,
        learning_rate: float,
        grad_scale: Array | None = None,
        *,
        donate: bool = False,
    ) -> tuple[Any, Any]:
        """Make one update; see `Optimizer.update`."""
        leaves, rebuild = flatten_parameters(model)
        gradients = flatten_parameters(grads)[0]
        _check_shapes("gradient", leaves, gradients)
        if not isinstance(state, self._state):
            kind, expected = type(state).__name__, self._state.__name__
            raise ConfigError(f"state is of {kind}; expected {expected}, from init(model) or the last update")
        step: Any = state.step
        is_finite = isinstance(learning_rate, Real) and math.isfinite(learning_rate)
        if not is_finite and not is_array(learning_rate):
            raise ConfigError(f"learning_rate is {learning_rate!r}; expected a finite number")
        step = assign(step, step + 1) if donate and is_array(step) else step + 1
        slots = list(zip(leaves, gradients, strict=True))
        settings = Settings(learning_rate, grad_scale, donate)
        parameters, state = self._update(slots, state._replace(step=step), settings)
        return rebuild(parameters), state

    def _update(self, slots: Slots, state: Any, settings: Settings) -> tuple[Sequence[Array], Any]:
        """Return the new parameters and state; the step is counted."""
        raise NotImplementedError

    def _decays(self, parameters: Sequence[Array]) -> list[float]:
        """Return the weight decay of each parameter: that of the optimizer for two or more axes, or for all."""
        rate, everywhere = getattr(self, "weight_decay", 0.0), getattr(self, "decay_all", False)
        return [rate if everywhere or len(parameter.shape) > 1 else 0.0 for parameter in parameters]


def _check_shapes(name: str, leaves: Sequence[Array], arrays: Sequence[Array]) -> None:
    """Raise ShapeError unless each parameter has one array of its shape."""
    check_same_count(leaves, arrays)
    for leaf, array in zip(leaves, arrays, strict=True):
        if leaf.shape != array.shape:
            raise ShapeError(
                f"a {name} has shape {tuple(array.shape)}; expected that of its parameter, {tuple(leaf.shape)}"
            )


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
    """Adam (Kingma and Ba, 2015), with the constants of the Transformer (Vaswani et al., 2017, section 5.3)."""

    _state = AdamState

    beta1: float = option("Decay rate of the mean of the gradients.", default=0.9, at_least=0.0, below=1.0)
    beta2: float = option("Decay rate of the mean of the squared gradients.", default=0.98, at_least=0.0, below=1.0)
    epsilon: float = option("Added to the denominator.", default=1e-9, at_least=0.0)

    def _init(self, model: Any) -> AdamState:
        return AdamState(0, map_parameters(zero_moment, model), map_parameters(zero_moment, model))

    def _update(self, slots: Slots, state: Any, settings: Settings) -> tuple[Sequence[Array], Any]:
        (exp_avg, with_exp_avg), (exp_avg_sq, with_exp_avg_sq) = flatten(state.exp_avg), flatten(state.exp_avg_sq)
        check_same_count(slots, exp_avg, exp_avg_sq)
        leaves, gradients = _columns(slots, 2)
        updated = adam(
            list(zip(leaves, gradients, exp_avg, exp_avg_sq, strict=True)),
            **settings._asdict(),
            step=state.step,
            beta1=self.beta1,
            beta2=self.beta2,
            epsilon=self.epsilon,
            weight_decay=self._decays(leaves),
        )
        parameters, exp_avg, exp_avg_sq = _columns(updated, 3)
        return parameters, AdamState(state.step, with_exp_avg(exp_avg), with_exp_avg_sq(exp_avg_sq))


class AdamW(Adam):
    """Adam with decoupled weight decay (Loshchilov and Hutter, 2019).

    Each update also shrinks the parameters by learning_rate * weight_decay of themselves.
    """

    weight_decay: float = option("Weight decay.", default=0.01, at_least=0.0)
    decay_all: bool = option(
        "Decay every parameter; by default those of two or more axes: weights and embeddings, no biases.", default=False
    )


class Muon(AdamW):
    """Muon (Jordan et al., 2024) for weights, AdamW for all other parameters.

    An update of a weight is its momentum with all singular values near 1, so rare directions change as much as frequent
    ones. Muon usually needs far fewer updates than Adam; each takes longer. Updates are as large as those of AdamW (Liu
    et al., 2025, section 2.2), so the learning rate and the weight decay of AdamW fit.

    Weights are the matrices of which one side is at most `max_aspect_ratio` times the other. The embeddings and output
    layers of usual vocabularies are longer.
    """

    momentum: float = option("Decay rate of the momentum of weights.", default=0.95, at_least=0.0, below=1.0)
    num_iterations: int = option("Newton-Schulz iterations of an update.", default=5, at_least=1)
    max_aspect_ratio: float = option("Largest ratio of the sides of a weight.", default=8.0, at_least=1.0)

    def _init(self, model: Any) -> AdamState:
        exp_avg_sq = map_parameters(lambda leaf: None if self._is_weight(leaf) else zero_moment(leaf), model)
        return AdamState(0, map_parameters(zero_moment, model), exp_avg_sq)

    def _update(self, slots: Slots, state: Any, settings: Settings) -> tuple[Sequence[Array], Any]:
        exp_avg, with_exp_avg = flatten(state.exp_avg)
        _check_shapes("mean of gradients", [leaf for leaf, _ in slots], exp_avg)
        is_weight = [self._is_weight(leaf) for leaf, _ in slots]
        weights = [index for index, each in enumerate(is_weight) if each]
        others = [slot for slot, each in zip(slots, is_weight, strict=True) if not each]
        means = [mean for mean, each in zip(exp_avg, is_weight, strict=True) if not each]
        updated, adam_state = super()._update(others, state._replace(exp_avg=means), settings)

        def update_weight(index: int) -> tuple[Any, Any]:
            return muon(
                *slots[index],
                exp_avg[index],
                settings.grad_scale,
                learning_rate=settings.learning_rate,
                momentum=self.momentum,
                weight_decay=self.weight_decay,
                num_iterations=self.num_iterations,
            )

        if slots and is_numpy(slots):
            with blas_threads(1):
                updated_weights = iter(parallel_map(update_weight, weights))
        else:
            updated_weights = iter([update_weight(index) for index in weights])
        updated_others = zip(updated, adam_state.exp_avg, strict=True)
        parameters, exp_avg = _columns([next(updated_weights if each else updated_others) for each in is_weight], 2)
        return parameters, adam_state._replace(exp_avg=with_exp_avg(exp_avg))

    def _is_weight(self, parameter: Array) -> bool:
        shape = parameter.shape
        return len(shape) == 2 and 0 < max(shape) <= self.max_aspect_ratio * min(shape)


class SGDState(NamedTuple):
    """Number of updates, and the velocities (a tree like the model; None without momentum)."""

    step: int
    velocity: Any


class SGD(_Optimizer):
    """Stochastic gradient descent with momentum, as torch.optim.SGD (without dampening and weight decay)."""

    _state = SGDState

    momentum: float = option(
        "Decay rate of the velocity; 0 is plain gradient descent.", default=0.9, at_least=0.0, below=1.0
    )
    nesterov: bool = option("Use Nesterov's momentum (Sutskever et al., 2013).", default=False)

    def _init(self, model: Any) -> SGDState:
        return SGDState(0, map_parameters(zero_moment, model) if self.momentum else None)

    def _update(self, slots: Slots, state: Any, settings: Settings) -> tuple[Sequence[Array], Any]:
        old, with_velocity = flatten(state.velocity)
        velocities = [None] * len(slots) if state.velocity is None else old
        if state.velocity is not None:
            _check_shapes("velocity", [leaf for leaf, _ in slots], old)
        options: Any = {
            "learning_rate": settings.learning_rate,
            "momentum": self.momentum,
            "nesterov": self.nesterov,
        }
        updated = [
            sgd(*slot, velocity, settings.grad_scale, **options)
            for slot, velocity in zip(slots, velocities, strict=True)
        ]
        parameters, new = _columns(updated, 2)
        return parameters, SGDState(state.step, None if state.velocity is None else with_velocity(new))


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
    """

    _state = AdafactorState

    beta2_decay: float = option(
        "At update t the decay rate of the running means is 1 - t ** beta2_decay.", default=-0.8
    )
    epsilon: float | None = option(
        "Lower bound of the root of the second moment; default the precision of the dtype.", default=None, at_least=0.0
    )
    min_scale: float = option("Lower bound of the size of a parameter.", default=1e-3, at_least=0.0)
    clip_threshold: float = option(
        "Largest root mean square of an update before it is scaled.", default=1.0, at_least=0.0
    )
    scale_parameter: bool = option("Make the learning rate relative to the size of each parameter.", default=True)
    relative_step: bool = option("Limit the learning rate to 1 / sqrt(t).", default=True)
    weight_decay: float = option("Weight decay, as in AdamW.", default=0.0, at_least=0.0)
    decay_all: bool = option("Decay every parameter, as in AdamW.", default=False)

    def _init(self, model: Any) -> AdafactorState:
        leaves, rebuild = flatten_parameters(model)
        columns = _columns([zero_factors(leaf) for leaf in leaves], 3)
        return AdafactorState(0, *(rebuild(column, keep=False) for column in columns))

    def _update(self, slots: Slots, state: Any, settings: Settings) -> tuple[Sequence[Array], Any]:
        step, leaves = state.step, [leaf for leaf, _ in slots]
        learning_rate, grad_scale, _ = settings
        trees = [flatten(tree) for tree in state[1:]]
        rows, cols, others = (iter(means) for means, _ in trees)
        factors = [
            (None, None, next(others)) if len(leaf.shape) < 2 else (next(rows), next(cols), None) for leaf in leaves
        ]
        decays = self._decays(leaves)
        options: Any = {
            "step_size": min(learning_rate, 1.0 / math.sqrt(step)) if self.relative_step else learning_rate,
            "beta2": 1.0 - math.pow(step, self.beta2_decay),
            "epsilon": self.epsilon,
            "min_scale": self.min_scale if self.scale_parameter else None,
            "clip_threshold": self.clip_threshold,
        }
        updated = [
            adafactor(leaf, grad, row, column, variance, grad_scale, **options, decay=1.0 - learning_rate * decay)
            for (leaf, grad), (row, column, variance), decay in zip(slots, factors, decays, strict=True)
        ]
        parameters, *columns = _columns(updated, 4)
        kept = ([mean for mean in column if mean is not None] for column in columns)
        new = (rebuild(means) for (_, rebuild), means in zip(trees, kept, strict=True))
        return parameters, AdafactorState(step, *new)


def _columns(rows: Sequence[tuple[Any, ...]], count: int) -> list[Any]:
    """Transpose rows of `count` items; `rows` may be empty."""
    return list(zip(*rows, strict=True)) or [()] * count
