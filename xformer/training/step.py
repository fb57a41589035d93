"""One training step, from top to bottom."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from xformer.backends import Array, array_namespace
from xformer.errors import ConfigError, TrainingError
from xformer.ops.squared_norm import squared_norm
from xformer.random import Rng
from xformer.training.precision import UNSCALED, GradScaler
from xformer.tree import flatten, map_arrays

GradientFunction = Callable[[Any, Sequence[Any], Sequence[Rng]], tuple[Any, Any]]


class StepResult(NamedTuple):
    """What one step made: the new model and optimizer state, the loss (nats a token), the gradient's norm, and the
    scale of the next step's loss; where that is smaller than this one's, no update was made."""

    model: Any
    state: Any
    loss: float
    gradient_norm: float
    scale: GradScaler = UNSCALED


def train_step(
    model: Any,
    state: Any,
    batches: Sequence[Sequence[Any]],
    rng: Rng,
    *,
    gradient: GradientFunction,
    optimizer: Any,
    learning_rate: float,
    max_grad_norm: float,
    scale: GradScaler = UNSCALED,
) -> StepResult:
    """Make one update from one or several batches, each given in shards; `model` and `state` are consumed.

    gradient: sums a function of (shard, tokens of the whole update), and its gradient, over the shards of a batch, as
    ShardedGradient(functools.partial(weighted_loss, loss=...), threads) does. scale: for float16 (see precision.py).

    Raises ConfigError for a learning rate that is not finite or a max_grad_norm that is not positive, TrainingError when the
    loss or the gradient is not finite, whatever the scale; nothing is updated then.
    """
    if not math.isfinite(learning_rate):
        raise ConfigError(f"learning_rate is {learning_rate}; expected a finite number")
    scaled_loss, gradients = accumulate(gradient, model, batches, rng, scale.value)
    norm = global_norm(gradients)
    factor = clip_factor(scaled_loss, norm, max_grad_norm, scale.value)
    new_model, new_state = optimizer.update(model, gradients, state, learning_rate, factor)
    # Only here must the host wait for a GPU, which has all of the step to do by now.
    loss, gradient_norm = float(scaled_loss) / scale.value, float(norm) / scale.value
    if math.isfinite(loss) and math.isfinite(gradient_norm):
        return StepResult(new_model, new_state, loss, gradient_norm, scale.grown())
    smaller = scale.halved()
    if smaller is None:
        raise TrainingError(f"the loss is {loss} and the gradient norm {gradient_norm}; lower the learning rate")
    return StepResult(model, state, loss, gradient_norm, smaller)


def accumulate(
    gradient: GradientFunction, model: Any, batches: Sequence[Sequence[Any]], rng: Rng, scale: float = 1.0
) -> tuple[Any, Any]:
    """Add up loss and gradients of several batches, one after the other, so that memory is needed for one at a time.

    Each token weighs the same, whatever batch it is in: the sum is that of one large batch, times the scale.
    """
    total = sum(shard.num_tokens for shards in batches for shard in shards) / scale
    rngs = iter(rng.split(sum(map(len, batches))))
    loss, gradients = None, None
    for shards in batches:
        more = gradient(model, [(shard, total) for shard in shards], [next(rngs) for _ in shards])
        loss = more[0] if loss is None else loss + more[0]
        gradients = more[1] if gradients is None else map_arrays(operator.add, gradients, more[1])
    return loss, gradients


def global_norm(gradients: Any) -> Array:
    """The square root of the sum of the squares of all elements of a tree, a scalar."""
    squares = squared_norm(*flatten(gradients)[0])
    return array_namespace(squares).sqrt(squares)


def clip_factor(loss: Array, norm: Array, max_grad_norm: float, scale: float) -> Array:
    """What gradients are to be multiplied by, so that their norm is at most `max_grad_norm` (Pascanu et al., 2013).

    scale: of the loss, the gradients and their norm, which the factor takes away. NaN where one of them is not finite.
    Raises ConfigError unless max_grad_norm is positive; infinity clips nothing.
    """
    if not max_grad_norm > 0.0:
        raise ConfigError(f"max_grad_norm is {max_grad_norm}; expected more than 0 (math.inf: no clipping)")
    xp = array_namespace(norm)
    finite = xp.finfo(norm.dtype)
    # A limit beyond the dtype's range, as infinity, would make 0 / 0 or inf / inf of norms that are fine.
    limit = min(max(max_grad_norm * scale, float(finite.smallest_normal)), float(finite.max)) * xp.ones_like(norm)
    is_finite = xp.logical_and(xp.isfinite(loss), xp.isfinite(norm))
    return xp.where(is_finite, limit / xp.maximum(norm, limit) / scale, math.nan * limit)


def clip_by_global_norm(gradients: Any, max_grad_norm: float) -> tuple[Any, float]:
    """Scale all gradients down together when their norm is above `max_grad_norm`; returns them and the norm they had.

    Where that is not finite all of them become NaN. `train_step` leaves the scaling to the update. Raises ConfigError
    unless max_grad_norm is positive.
    """
    norm = global_norm(gradients)
    factor = float(clip_factor(norm, norm, max_grad_norm, 1.0))
    return gradients if factor == 1.0 else map_arrays(lambda leaf: factor * leaf, gradients), float(norm)


def not_finite(model: Any) -> str | None:
    """The name of a parameter that holds what is no finite number; None where there is none."""
    for name, array in model.named_parameters():
        xp = array_namespace(array)
        if not bool(xp.all(xp.isfinite(array))):
            return str(name)
    return None
