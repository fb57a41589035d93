"""One training step, from top to bottom."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, Generic, NamedTuple

import numpy as np

from xformer import tracing
from xformer.backends import Array, array_namespace
from xformer.backends.array_types import S, T
from xformer.errors import ConfigError, DataError
from xformer.ops.optimizers import cast_number, squared_norm
from xformer.random import Rng, split_rng
from xformer.tree import flatten, flatten_parameters, is_array, map_arrays

Loss = Callable[[T, S, Rng | None], Array]  # (model, batch, rng) -> summed loss
ValueAndGrad = Callable[[Callable[..., Array]], Callable[..., tuple[Array, Any]]]


class StepResult(NamedTuple, Generic[T]):
    """The new model and optimizer state, the loss before the update, and the norm of its gradient: scalar arrays.

    If the loss or the norm is not finite the model and the moments in the state are unchanged.
    """

    model: T
    state: Any
    loss: Array
    grad_norm: Array


@dataclass(frozen=True)
class _Weighted:
    """A loss (model, batch, rng, weight) -> weight times the sum; equal for the same `loss_fn`."""

    loss_fn: Loss[Any, Any]

    def __call__(self, model: Any, batch: Any, rng: Rng | None, weight: float | Array) -> Array:
        loss = self.loss_fn(model, batch, rng)
        if not is_array(loss):
            raise ConfigError(f"loss_fn returned {loss!r}; expected a scalar array")
        return cast_number(weight, loss) * loss


def train_step(
    model: T,
    state: Any,
    batches: Sequence[Any],
    rng: Rng | None,
    *,
    loss_fn: Loss[T, Any],
    optimizer: Any,
    learning_rate: float | Array,
    max_grad_norm: float = math.inf,
    loss_scale: float | Array = 1.0,
    num_tokens: int | Array | None = None,
    value_and_grad: ValueAndGrad = tracing.value_and_grad,
    donate: bool = False,
) -> StepResult[T]:
    """Make one update: forward, backward, clipping, optimizer.

    Nothing waits for a GPU: the loss and the norm are arrays, and a NaN among them skips the update on the device. With
    Adam the step can run as a CUDA graph: numbers that change are then scalar arrays, which are read on the device:
    learning_rate, loss_scale, the step in the state (floating), and the counter of `Rng.with_counter`.

    Args:
        model: A Module, or any tree of arrays.
        state: `optimizer.init(model)`, or the state of the last step.
        batches: One batch, or several whose gradients are accumulated one after the other.
        rng: Source of dropout masks; None for no dropout.
        loss_fn: (model, batch, rng) -> the sum of the losses of a batch's tokens, a scalar.
        optimizer: An `Optimizer`, e.g. `Adam()`.
        learning_rate: Step size of this update.
        max_grad_norm: Largest norm of the gradient, to which larger ones are scaled down; math.inf is no clipping.
        loss_scale: Factor of the loss while it is differentiated, for float16 (see precision.py).
        num_tokens: Number of tokens of all batches; default the sum of `batch.num_tokens`.
        value_and_grad: `tracing.value_and_grad`, or `data_parallel(num_workers)`.
        donate: Reuse the memory of `model` and `state`, which must not be used afterwards.

    Returns:
        A StepResult. The loss is the mean over the tokens.

    Raises:
        DataError: If the batches have no tokens.
        ConfigError: If `num_tokens` is None and a batch has none, or if the loss is no array.
    """
    if num_tokens is None:
        if not all(hasattr(batch, "num_tokens") for batch in batches):
            raise ConfigError("num_tokens is None and a batch has no num_tokens; pass their number of tokens")
        num_tokens = sum(batch.num_tokens for batch in batches)
    if type(num_tokens) is not int or num_tokens < 1:
        _check_tokens(num_tokens, batches)
    loss, grads = accumulate(value_and_grad(_Weighted(loss_fn)), model, batches, rng, loss_scale / num_tokens)
    grad_norm = global_norm(grads)
    grad_scale = clip_scale(loss, grad_norm, max_grad_norm, loss_scale)
    model, state = optimizer.update(model, grads, state, learning_rate, grad_scale, donate=donate)
    result = StepResult(model, state, loss / loss_scale, grad_norm / loss_scale)
    return array_namespace(loss).library.persist(loss, result, flatten)


def _check_tokens(num_tokens: Any, batches: Sequence[Any]) -> None:
    """Raise DataError unless there is a token; a number on a device, or of a trace, is not read."""
    if is_array(num_tokens) and not isinstance(num_tokens, np.ndarray | np.generic):
        return
    is_number = isinstance(num_tokens, Real | np.ndarray)
    if not is_number or not num_tokens > 0:
        raise DataError(f"num_tokens is {num_tokens!r} for {len(batches)} batches; expected at least 1")


def accumulate(
    loss_and_grads: Callable[..., tuple[Array, Any]], model: Any, batches: Sequence[Any], rng: Rng | None, *args: Any
) -> tuple[Array, Any]:
    """Return the sums of the losses and gradients of several batches, computed one after the other.

    Args:
        loss_and_grads: (model, batch, rng, *args) -> (loss, gradient).
        model: The model.
        batches: At least one batch.
        rng: Source of dropout masks, or None.
        *args: More arguments of `loss_and_grads`.

    Raises:
        ConfigError: If there is no batch.
    """
    total = None
    for batch, key in zip(batches, split_rng(rng, len(batches)), strict=True):
        result = loss_and_grads(model, batch, key, *args)
        total = result if total is None else map_arrays(operator.add, total, result)
    if total is None:
        raise ConfigError("batches is empty; expected at least one batch")
    return total


def global_norm(grads: Any) -> Array:
    """Return the square root of the sum of the squares of all floating elements of a tree, a scalar."""
    squares = squared_norm(*flatten_parameters(grads)[0])
    return array_namespace(squares).sqrt(squares)


def clip_scale(loss: Array, grad_norm: Array, max_grad_norm: float, loss_scale: float | Array = 1.0) -> Array:
    """Return the factor that clips and unscales gradients (Pascanu et al., 2013), a scalar array.

    Args:
        loss: Scaled loss.
        grad_norm: Norm of the scaled gradient.
        max_grad_norm: Largest norm of the unscaled gradient; math.inf clips nothing.
        loss_scale: Scale of the two.

    Returns:
        min(1, max_grad_norm / norm) / loss_scale, or NaN if the loss or the norm is not finite.

    Raises:
        ConfigError: If max_grad_norm is not positive.
    """
    if not max_grad_norm > 0.0:
        raise ConfigError(f"max_grad_norm is {max_grad_norm}; expected a number above 0 (math.inf: no clipping)")
    xp = array_namespace(grad_norm)
    limits = xp.finfo(grad_norm.dtype)
    # A limit beyond the dtype's range, such as infinity, would turn finite norms into 0 / 0 or inf / inf.
    lowest, highest, limit = float(limits.smallest_normal), float(limits.max), max_grad_norm * loss_scale
    if is_array(limit):  # which is not read on the host
        limit = xp.clip(xp.astype(limit, grad_norm.dtype), lowest, highest)
    else:
        limit = min(max(limit, lowest), highest) * xp.ones_like(grad_norm)
    is_finite = xp.logical_and(xp.isfinite(loss), xp.isfinite(grad_norm))
    return xp.where(is_finite, limit / xp.maximum(grad_norm, limit) / loss_scale, math.nan * limit)


def clip_by_global_norm(grads: T, max_grad_norm: float) -> tuple[T, Array]:
    """Scale all gradients down together if their norm is larger than `max_grad_norm`.

    `train_step` leaves the scaling to the optimizer's update, which saves a pass over the gradients.

    Args:
        grads: A tree of arrays.
        max_grad_norm: Largest norm.

    Returns:
        The scaled gradients, all NaN if their norm is not finite, and the norm before, a scalar array.

    Raises:
        ConfigError: If max_grad_norm is not positive.
    """
    norm = global_norm(grads)
    scale = clip_scale(norm, norm, max_grad_norm)
    leaves, rebuild = flatten_parameters(grads)
    return rebuild([array_namespace(leaf).astype(scale, leaf.dtype) * leaf for leaf in leaves]), norm
