"""One training step, from top to bottom."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from xformer.errors import TrainingError
from xformer.namespace import array_namespace
from xformer.ops.squared_norm import squared_norm
from xformer.random import Rng
from xformer.tree import flatten, map_arrays

GradientFunction = Callable[[Any, Sequence[Any], Sequence[Rng]], tuple[Any, Any]]


class StepResult(NamedTuple):
    """What one step made: the new model and optimizer state, the loss (nats a token) and the gradient's norm."""

    model: Any
    state: Any
    loss: float
    gradient_norm: float


def train_step(
    model: Any,
    state: Any,
    batches: Sequence[Sequence[Any]],
    rng: Rng,
    *,
    gradient: GradientFunction,
    optimizer: Any,
    learning_rate: float,
    max_norm: float,
) -> StepResult:
    """Make one update from one or several batches, each given in shards; `model` and `state` are consumed.

    gradient: sums a function of (shard, tokens of the whole update), and its gradient, over the shards of a batch, as
    ShardedGradient(functools.partial(share_of_mean, loss=...), threads) does.

    Raises TrainingError, before anything is updated, when the loss or the gradient is not finite.
    """
    loss, gradients = accumulate(gradient, model, batches, rng)
    gradients, norm = clip_by_global_norm(gradients, max_norm)
    check_finite(float(loss), norm)
    model, state = optimizer.update(model, gradients, state, learning_rate)
    return StepResult(model, state, float(loss), norm)


def accumulate(gradient: GradientFunction, model: Any, batches: Sequence[Sequence[Any]], rng: Rng) -> tuple[Any, Any]:
    """Add up loss and gradients of several batches, one after the other, so that memory is needed for one at a time.

    Each token weighs the same, whatever batch it is in: the sum is that of one large batch.
    """
    total = sum(shard.num_tokens for shards in batches for shard in shards)
    rngs = iter(rng.split(sum(map(len, batches))))
    loss, gradients = None, None
    for shards in batches:
        more = gradient(model, [(shard, total) for shard in shards], [next(rngs) for _ in shards])
        loss = more[0] if loss is None else loss + more[0]
        gradients = more[1] if gradients is None else map_arrays(operator.add, gradients, more[1])
    return loss, gradients


def global_norm(gradients: Any) -> float:
    """The square root of the sum of the squares of all elements of a tree."""
    return math.sqrt(float(squared_norm(*flatten(gradients)[0])))


def clip_by_global_norm(gradients: Any, max_norm: float) -> tuple[Any, float]:
    """Scale all gradients down together when their norm is above `max_norm` (Pascanu et al., 2013).

    Returns the gradients and the norm that they had.
    """
    norm = global_norm(gradients)
    if not norm > max_norm:
        return gradients, norm
    scale = max_norm / norm
    return map_arrays(lambda leaf: leaf * scale, gradients), norm


def check_finite(loss: float, norm: float) -> None:
    """Raise TrainingError unless both are finite numbers."""
    if not (math.isfinite(loss) and math.isfinite(norm)):
        raise TrainingError(f"the loss is {loss} and the gradient norm {norm}; lower the learning rate")


def not_finite(model: Any) -> str | None:
    """The name of a parameter that holds what is no finite number; None where there is none."""
    for name, array in model.named_parameters():
        xp = array_namespace(array)
        if not bool(xp.all(xp.isfinite(array))):
            return str(name)
    return None
