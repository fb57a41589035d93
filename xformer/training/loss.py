"""The training objective of a translator."""

from __future__ import annotations

from xformer.models import Transformer
from xformer.namespace import Array, array_namespace
from xformer.ops import cross_entropy
from xformer.random import Rng
from xformer.training.batches import Batch


def translation_loss(
    model: Transformer, batch: Batch, rng: Rng | None = None, *, label_smoothing: float = 0.0
) -> Array:
    """Sum of the cross-entropies of all labels that are not padding, in nats: a scalar.

    A sum, not a mean, so that shards of a batch add up; divide by the number of tokens of the whole batch.
    """
    logits = model(batch.source, batch.target, rng=rng)
    losses = cross_entropy(logits, batch.labels, pad_id=model.config.pad_id, label_smoothing=label_smoothing)
    return array_namespace(losses).sum(losses)
