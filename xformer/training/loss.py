"""Training objectives: sums over tokens, in nats, so that the shards of a batch add up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from xformer.backends import Array, array_namespace, device
from xformer.data.pairs import Batch
from xformer.data.windows import TextChunks
from xformer.models import LanguageModel, Transformer
from xformer.ops import cross_entropy
from xformer.random import Rng
from xformer.threads import parallel_map
from xformer.training.interrupt import until_stopped

_NO_PADDING = -1  # no token has this id


def translation_loss(
    model: Transformer, batch: Batch, rng: Rng | None = None, *, label_smoothing: float = 0.0, z_loss: float = 0.0
) -> Array:
    """Sum of the cross-entropies of all labels that are not padding, in nats: a scalar.

    A sum, not a mean, so that shards of a batch add up; divide by the number of tokens of the whole batch.
    """
    logits = model(batch.source, batch.target, rng=rng)
    pad_id = _NO_PADDING if model.config.padding_id is None else model.config.padding_id
    losses = cross_entropy(logits, batch.labels, pad_id=pad_id, label_smoothing=label_smoothing, z_loss=z_loss)
    return array_namespace(losses).sum(losses)


def language_model_loss(
    model: LanguageModel,
    windows: TextChunks,
    rng: Rng | None = None,
    *,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> Array:
    """Sum of the cross-entropies of all positions, in nats: a scalar. There is no padding: pad_id is a token too."""
    xp = array_namespace(windows.tokens)
    everything = xp.ones((1, 1, 1, 1), dtype=xp.bool, device=device(windows.tokens))
    logits = model(windows.tokens, mask=everything, rng=rng)
    losses = cross_entropy(logits, windows.labels, pad_id=_NO_PADDING, label_smoothing=label_smoothing, z_loss=z_loss)
    return array_namespace(losses).sum(losses)


def weighted_loss(model: Any, shard: tuple[Any, float], rng: Rng, *, loss: Callable[..., Array]) -> Array:
    """The part that a shard, given with the number of tokens of the whole update, has in the update's mean loss.

    A number of tokens that was divided by a scale makes that the scale of the loss.
    """
    batch, total = shard
    return loss(model, batch, rng) / float(total)


def mean_loss(loss: Callable[..., Array], model: Any, batches: Sequence[Any], threads: int) -> float:
    """The mean over the tokens of all batches, in nats, with so many batches worked on side by side.

    Raises Stopped when the user asks to stop.
    """

    def summed(batches: Sequence[Any]) -> float:
        return sum((float(loss(model, batch)) for batch in until_stopped(batches)), 0.0)

    parts = parallel_map(summed, [batches[start::threads] for start in range(threads)])
    tokens: int = sum(batch.num_tokens for batch in batches)
    return sum(parts) / max(1, tokens)
