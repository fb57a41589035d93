"""Losses (model, batch, rng) -> sum over the tokens, in nats, so that the shards of a batch add up."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

from xformer.backends import Array, array_namespace, base_namespace, device
from xformer.data.chunks import TextChunks
from xformer.data.pairs import Batch
from xformer.distributed import Communicator, SingleProcess
from xformer.errors import DataError
from xformer.layers import RecordedRouting, load_balancing_loss, record_routing
from xformer.models import LanguageModel, Transformer
from xformer.ops import cross_entropy
from xformer.random import Rng
from xformer.threads import blas_threads, num_threads, parallel_map
from xformer.training.interrupt import until_stopped

Item = TypeVar("Item")
_MISSING: Any = object()


def translation_loss(
    model: Transformer,
    batch: Batch,
    rng: Rng | None = None,
    *,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    load_balancing: float = 0.0,
) -> Array:
    """Return the sum of the cross-entropies of all labels that are not padding, in nats.

    Args:
        model: The model.
        batch: A batch of sentence pairs.
        rng: Source of dropout masks; None for no dropout.
        label_smoothing: Probability that is spread over all tokens (Szegedy et al., 2016).
        z_loss: Weight of the squared logarithm of the softmax's denominator (PaLM uses 1e-4).
        load_balancing: Weight of `load_balancing_loss` for each label, if the model has experts. Padding counts there.
    """
    _check_batch(batch, "source", "target", "labels")
    with _recorded(model, load_balancing) as routing:
        logits = model(batch.source, batch.target, rng=rng)
    pad_id = model.config.label_padding_id
    losses = cross_entropy(logits, batch.labels, pad_id=pad_id, label_smoothing=label_smoothing, z_loss=z_loss)
    return _balanced(losses, batch, routing, load_balancing)


def language_model_loss(
    model: LanguageModel,
    batch: TextChunks,
    rng: Rng | None = None,
    *,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    load_balancing: float = 0.0,
) -> Array:
    """Return the sum of the cross-entropies of all positions, in nats; no token counts as padding.

    Args:
        model: The model.
        batch: A batch of text chunks.
        rng: Source of dropout masks; None for no dropout.
        label_smoothing: As in `translation_loss`.
        z_loss: As in `translation_loss`.
        load_balancing: As in `translation_loss`.
    """
    _check_batch(batch, "tokens", "labels")
    like = next(iter(model.named_parameters()))[1]
    xp = base_namespace(array_namespace(like))
    everything = xp.ones((1, 1, 1, 1), dtype=xp.bool, device=device(like))
    with _recorded(model, load_balancing) as routing:
        logits = model(batch.tokens, mask=everything, rng=rng)
    losses = cross_entropy(logits, batch.labels, label_smoothing=label_smoothing, z_loss=z_loss)
    return _balanced(losses, batch, routing, load_balancing)


def _recorded(
    model: Transformer | LanguageModel, load_balancing: float
) -> AbstractContextManager[list[RecordedRouting]]:
    """Record the routing of a model with experts, unless the weight of its loss is 0."""
    return record_routing() if load_balancing and model.config.num_experts else nullcontext([])


def _balanced(losses: Array, batch: Batch | TextChunks, routing: list[RecordedRouting], weight: float) -> Array:
    """Return the sum of the losses of a batch and, for each label, of the weighted load-balancing loss."""
    total = array_namespace(losses).sum(losses)
    return total + (weight * batch.num_tokens) * load_balancing_loss(routing) if routing else total


def _check_batch(batch: Any, *names: str) -> None:
    if not all(hasattr(batch, name) for name in names):
        expected = f"a batch with {' and '.join(names)}, e.g. of TokenPairs or TextChunks"
        raise DataError(f"the loss got a {type(batch).__name__} as batch; expected {expected}")


def mean_loss(
    loss_fn: Callable[..., Array],
    model: Any,
    batches: Iterable[Any],
    num_workers: int = 1,
    count_tokens: Callable[[Any], int] = lambda batch: batch.num_tokens,
    communicator: Communicator | None = None,
) -> float:
    """Return the mean of a loss over the tokens of all batches, without dropout.

    The losses of the batches are added in order, whatever computes them.

    Args:
        loss_fn: (model, batch, rng) -> the sum over the tokens of a batch.
        model: The model.
        batches: The batches.
        num_workers: Number of batches that are computed in parallel, by all ranks together.
        count_tokens: Counts the tokens of a batch.
        communicator: The ranks, which compute the batches in turns; default this process alone.

    Raises:
        Stopped: After a signal.
    """
    batches, ranks = list(batches), communicator or SingleProcess()
    own = batches[ranks.rank :: ranks.size]
    num_parts = max(1, num_workers // ranks.size)

    def compute(part: list[Any]) -> list[float]:
        return [float(loss_fn(model, batch, None)) for batch in until_stopped(part)]

    with blas_threads(1 if num_workers > 1 else num_threads()):
        parts = parallel_map(compute, [own[start::num_parts] for start in range(num_parts)])
    losses = interleave([interleave(parts) for parts in ranks.all_gather(parts)])
    return sum(losses) / max(1, sum(map(count_tokens, batches)))


def interleave(parts: Sequence[Sequence[Item]]) -> list[Item]:
    """Return the list whose slices [0::n], [1::n], ... are the n parts."""
    rows = itertools.zip_longest(*parts, fillvalue=_MISSING)
    return [item for row in rows for item in row if item is not _MISSING]
