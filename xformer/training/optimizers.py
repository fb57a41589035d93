"""Optimizers: `state = optimizer.init(model)`, then `model, state = optimizer.update(...)` in each step.

A state is a NamedTuple of the number of updates and of trees like the model, in which a leaf is None where the
optimizer keeps no statistic for that parameter. Checkpoints rely on nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

from xformer.backends import Array
from xformer.config import Config, option
from xformer.ops.adafactor import adafactor, zero_factors
from xformer.ops.adam import adam, zero_moment
from xformer.ops.muon import muon
from xformer.ops.sgd import sgd
from xformer.threads import blas_threads, parallel_map
from xformer.training.data_parallel import is_numpy
from xformer.tree import flatten, is_array, map_arrays


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
            grads: A tree of the same structure.
            state: What `init` or the last update returned.
            learning_rate: Step size.
            grad_scale: A scalar array that multiplies the gradients; NaN leaves every array as it is and only counts
                the update, so clipping and overflow checks need no host synchronization.
            donate: Reuse the memory of `model` and `state` where the backend can; they must not be used afterwards.

        Returns:
            The new model and state; new arrays unless `donate` is set.
        """


class _Hyperparameters(Config):
    """The hyperparameters of an optimizer; the learning rate is an argument of each update."""

    _usage = "pass the learning rate to fit or train_step"


class AdamState(NamedTuple):
    """Number of updates, and running means of the gradients and of their squares (trees like the model)."""

    step: int
    exp_avg: Any
    exp_avg_sq: Any


class Adam(_Hyperparameters):
    """Adam (Kingma and Ba, 2015), with the constants of the Transformer (Vaswani et al., 2017, section 5.3)."""

    beta1: float = option("Decay rate of the mean of the gradients.", default=0.9, at_least=0.0, below=1.0)
    beta2: float = option("Decay rate of the mean of the squared gradients.", default=0.98, at_least=0.0, below=1.0)
    epsilon: float = option("Added to the denominator.", default=1e-9, at_least=0.0)

    def init(self, model: Any) -> AdamState:
        """Return the state before the first update: zero moments."""
        return AdamState(0, map_arrays(zero_moment, model), map_arrays(zero_moment, model))

    def update(
        self,
        model: Any,
        grads: Any,
        state: AdamState,
        learning_rate: float,
        grad_scale: Array | None = None,
        *,
        donate: bool = False,
    ) -> tuple[Any, AdamState]:
        """Make one update; see `Optimizer.update`."""
        leaves, rebuild = flatten(model)
        step = _next_step(state.step, donate)
        (exp_avg, with_exp_avg), (exp_avg_sq, with_exp_avg_sq) = flatten(state.exp_avg), flatten(state.exp_avg_sq)
        updated = adam(
            list(zip(leaves, flatten(grads)[0], exp_avg, exp_avg_sq, strict=True)),
            learning_rate=learning_rate,
            step=step,
            beta1=self.beta1,
            beta2=self.beta2,
            epsilon=self.epsilon,
            weight_decay=[self.decay(leaf) for leaf in leaves],
            grad_scale=grad_scale,
            donate=donate,
        )
        parameters, exp_avg, exp_avg_sq = _columns(updated, 3)
        return rebuild(parameters), AdamState(step, with_exp_avg(exp_avg), with_exp_avg_sq(exp_avg_sq))

    def decay(self, parameter: Array) -> float:
        """Return the weight decay of a parameter: 0."""
        return 0.0


class AdamW(Adam):
    """Adam with decoupled weight decay (Loshchilov and Hutter, 2019).

    Each update also shrinks the parameters by learning_rate * weight_decay of themselves.
    """

    weight_decay: float = option("Weight decay.", default=0.01, at_least=0.0)
    decay_all: bool = option(
        "Decay every parameter; by default those of two or more axes: weights and embeddings, no biases.", default=False
    )

    def decay(self, parameter: Array) -> float:
        """Return the weight decay of a parameter."""
        return _decay(parameter, self.weight_decay, self.decay_all)


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

    def init(self, model: Any) -> AdamState:
        """Return the state before the first update: zero moments; weights have no second one."""
        exp_avg_sq = map_arrays(lambda leaf: None if self._is_weight(leaf) else zero_moment(leaf), model)
        return AdamState(0, map_arrays(zero_moment, model), exp_avg_sq)

    def update(
        self,
        model: Any,
        grads: Any,
        state: AdamState,
        learning_rate: float,
        grad_scale: Array | None = None,
        *,
        donate: bool = False,
    ) -> tuple[Any, AdamState]:
        """Make one update; see `Optimizer.update`."""
        leaves, rebuild = flatten(model)
        exp_avg, with_exp_avg = flatten(state.exp_avg)
        exp_avg_sq, with_exp_avg_sq = flatten(state.exp_avg_sq)
        slots = list(zip(leaves, flatten(grads)[0], exp_avg, strict=True))
        weights = [slot for slot in slots if self._is_weight(slot[0])]
        others, other_grads, means = _columns([slot for slot in slots if not self._is_weight(slot[0])], 3)
        adam_state = AdamState(state.step, means, exp_avg_sq)
        others, adam_state = super().update(others, other_grads, adam_state, learning_rate, grad_scale, donate=donate)

        def update_weight(slot: tuple[Any, Any, Any]) -> tuple[Any, Any]:
            return muon(
                *slot,
                grad_scale,
                learning_rate=learning_rate,
                momentum=self.momentum,
                weight_decay=self.weight_decay,
                num_iterations=self.num_iterations,
            )

        if is_numpy(leaves):
            with blas_threads(1):
                updated_weights = iter(parallel_map(update_weight, weights))
        else:
            updated_weights = iter([update_weight(slot) for slot in weights])
        updated_others = zip(others, adam_state.exp_avg, strict=True)
        updated = [next(updated_weights if self._is_weight(leaf) else updated_others) for leaf in leaves]
        parameters, exp_avg = _columns(updated, 2)
        state = AdamState(adam_state.step, with_exp_avg(exp_avg), with_exp_avg_sq(adam_state.exp_avg_sq))
        return rebuild(parameters), state

    def _is_weight(self, parameter: Array) -> bool:
        shape = parameter.shape
        return len(shape) == 2 and 0 < max(shape) <= self.max_aspect_ratio * min(shape)


class SGDState(NamedTuple):
    """Number of updates, and the velocities (a tree like the model; None without momentum)."""

    step: int
    velocity: Any


class SGD(_Hyperparameters):
    """Stochastic gradient descent with momentum, as torch.optim.SGD (without dampening and weight decay)."""

    momentum: float = option(
        "Decay rate of the velocity; 0 is plain gradient descent.", default=0.9, at_least=0.0, below=1.0
    )
    nesterov: bool = option("Use Nesterov's momentum (Sutskever et al., 2013).", default=False)

    def init(self, model: Any) -> SGDState:
        """Return the state before the first update: zero velocities."""
        return SGDState(0, map_arrays(zero_moment, model) if self.momentum else None)

    def update(
        self,
        model: Any,
        grads: Any,
        state: SGDState,
        learning_rate: float,
        grad_scale: Array | None = None,
        *,
        donate: bool = False,
    ) -> tuple[Any, SGDState]:
        """Make one update; see `Optimizer.update`."""
        leaves, rebuild = flatten(model)
        velocities = [None] * len(leaves) if state.velocity is None else flatten(state.velocity)[0]
        options: Any = {"learning_rate": learning_rate, "momentum": self.momentum, "nesterov": self.nesterov}
        slots = zip(leaves, flatten(grads)[0], velocities, strict=True)
        parameters, velocity = _columns([sgd(*slot, grad_scale, **options) for slot in slots], 2)
        step = _next_step(state.step, donate)
        return rebuild(parameters), SGDState(step, None if state.velocity is None else rebuild(velocity))


class AdafactorState(NamedTuple):
    """Number of updates, and running means of the squared gradients (trees like the model).

    `row` and `column` hold the means of the rows and columns of every matrix, `variance` those of the elements of all
    other parameters.
    """

    step: int
    row: Any
    column: Any
    variance: Any


class Adafactor(_Hyperparameters):
    """Adafactor (Shazeer and Stern, 2018), as torch.optim.Adafactor.

    The second moment of a matrix is kept as one mean for each row and each column, so the state is far smaller than
    Adam's. The learning rate is relative to the size of each parameter, as in the paper; 0.01 is usual.
    """

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

    def init(self, model: Any) -> AdafactorState:
        """Return the state before the first update: zero means."""
        leaves, rebuild = flatten(model)
        return AdafactorState(0, *map(rebuild, _columns([zero_factors(leaf) for leaf in leaves], 3)))

    def update(
        self,
        model: Any,
        grads: Any,
        state: AdafactorState,
        learning_rate: float,
        grad_scale: Array | None = None,
        *,
        donate: bool = False,
    ) -> tuple[Any, AdafactorState]:
        """Make one update; see `Optimizer.update`."""
        leaves, rebuild = flatten(model)
        step = _next_step(state.step, donate)
        options: Any = {
            "step_size": min(learning_rate, 1.0 / math.sqrt(step)) if self.relative_step else learning_rate,
            "beta2": 1.0 - math.pow(step, self.beta2_decay),
            "epsilon": self.epsilon,
            "min_scale": self.min_scale if self.scale_parameter else None,
            "clip_threshold": self.clip_threshold,
        }
        updated = [
            adafactor(
                leaf,
                grad,
                *factors,
                grad_scale,
                **options,
                decay=1.0 - learning_rate * _decay(leaf, self.weight_decay, self.decay_all),
            )
            for leaf, grad, factors in zip(leaves, flatten(grads)[0], _factors(leaves, state), strict=True)
        ]
        parameters, *moments = _columns(updated, 4)
        return rebuild(parameters), AdafactorState(step, *map(rebuild, moments))


def _factors(leaves: Sequence[Array], state: AdafactorState) -> Iterator[tuple[Any, Any, Any]]:
    """Yield the state of each parameter; flattening a tree leaves out leaves that are None."""
    row, column, variance = (iter(flatten(tree)[0]) for tree in (state.row, state.column, state.variance))
    for leaf in leaves:
        yield (None, None, next(variance)) if len(leaf.shape) < 2 else (next(row), next(column), None)


def _next_step(step: Any, donate: bool) -> Any:
    """Return the number of this update; a donated array is counted up in place, so that a captured step finds it."""
    if donate and is_array(step):
        step += 1
        return step
    return step + 1


def _decay(parameter: Array, weight_decay: float, decay_all: bool) -> float:
    return weight_decay if decay_all or len(parameter.shape) > 1 else 0.0


def _columns(rows: Sequence[tuple[Any, ...]], count: int) -> list[list[Any]]:
    """Transpose rows of `count` items; `rows` may be empty."""
    return [[row[index] for row in rows] for index in range(count)]
