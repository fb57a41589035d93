"""Losses (model, batch, rng) -> sum over the tokens, in nats, so that the shards of a batch add up."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from xformer.backends import Array, accumulation_dtype, array_namespace, device, to_library_of
from xformer.config import check_number
from xformer.data.packing import IGNORE_INDEX, PackedBatch, TextChunks
from xformer.data.pairs import Batch
from xformer.distributed import Communicator, SingleProcess
from xformer.errors import DataError, ShapeError, describe_type
from xformer.layers import RecordedRouting, load_balancing_loss, record_routing
from xformer.models import Encoder, LanguageModel, Transformer
from xformer.ops import cross_entropy, softmax
from xformer.random import Rng
from xformer.threads import blas_threads, num_threads, parallel_map
from xformer.training.interrupt import until_stopped


def translation_loss(
    model: Transformer,
    batch: Batch,
    rng: Rng | None = None,
    *,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    load_balancing: float = 0.0,
    r_drop: float = 0.0,
) -> Array:
    """Return the sum of the cross-entropies of all labels that are not padding, in nats.

    Args:
        model: The model.
        batch: A batch of sentence pairs.
        rng: Source of dropout masks; None for no dropout.
        label_smoothing: Probability that is spread over all tokens (Szegedy et al., 2016).
        z_loss: Weight of the squared logarithm of the softmax's denominator (PaLM uses 1e-4).
        load_balancing: Weight of `load_balancing_loss` for each label, if the model has experts; tokens of padding
            count there, too.
        r_drop: Weight of R-Drop (Wu et al., 2021, section 2.1). With two passes that have different dropout masks, the
            loss is the mean of both cross-entropies, plus r_drop / 2 times the mean of the Kullback-Leibler divergences
            of the outputs from each other: half the loss of the paper. Without an rng, there is one pass.

    Raises:
        ConfigError: If r_drop is negative or not finite.
    """
    _check_batch(batch, "source", "target", "labels")
    check_number("r_drop", r_drop, at_least=0)
    source, target, labels = batch.source, batch.target, batch.labels
    is_double = r_drop > 0.0 and rng is not None
    if is_double:
        like = next(iter(model.named_parameters()))[1]
        moved = [to_library_of(ids, like, "token ids are") for ids in (source, target, labels)]
        source, target, labels = (array_namespace(ids).concat([ids, ids]) for ids in moved)
    with _recorded(model, load_balancing) as routing:
        logits = model(source, target, rng=rng)
    pad_id = model.config.label_padding_id
    losses = cross_entropy(logits, labels, pad_id=pad_id, label_smoothing=label_smoothing, z_loss=z_loss)
    if is_double:
        half = labels.shape[0] // 2
        divergences = _divergences(logits[:half, ...], logits[half:, ...], labels[:half, ...], pad_id)
        losses = 0.5 * (losses[:half, ...] + losses[half:, ...] + r_drop * divergences)
    return _balanced(losses, batch, routing, load_balancing)


def language_model_loss(
    model: LanguageModel,
    batch: TextChunks | PackedBatch,
    rng: Rng | None = None,
    *,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    load_balancing: float = 0.0,
) -> Array:
    """Return the sum of the cross-entropies of all labels, in nats.

    Args:
        model: The model.
        batch: A batch of text chunks, in which no token counts as padding; or of packed documents.
        rng: Source of dropout masks; None for no dropout.
        label_smoothing: As in `translation_loss`.
        z_loss: As in `translation_loss`.
        load_balancing: As in `translation_loss`, but padding of packed documents does not count.
    """
    with _recorded(model, load_balancing) as routing:
        losses = _label_losses(model, batch, rng, label_smoothing=label_smoothing, z_loss=z_loss)
    return _balanced(losses, batch, routing, load_balancing)


def classification_loss(
    model: Encoder, batch: Batch, rng: Rng | None = None, *, label_smoothing: float = 0.0, **options: Any
) -> Array:
    """Return the sum of the losses of all labels, of the kind that the problem type of the model says.

    They are cross-entropies; for several labels a text binary cross-entropies; for regression squared errors.

    Args:
        model: A model with a classifier.
        batch: The texts are its sources. Its labels are numbers of classes, (batch, 1), or for several labels and for
            regression floating numbers (batch, num_labels).
        rng: Source of dropout masks; None for no dropout.
        label_smoothing: As in `translation_loss`, for one label.
        **options: Those of other losses have no effect.
    """
    _check_batch(batch, "source", "labels")
    logits = model.class_logits(batch.source, rng=rng)
    xp, labels, problem_type = array_namespace(logits), batch.labels, model.config.problem_type
    if problem_type == "single_label_classification":
        return xp.sum(cross_entropy(logits, labels[:, 0], label_smoothing=label_smoothing))
    labels = to_library_of(labels, logits, "labels are", dtype=logits.dtype)
    if problem_type == "regression":
        return xp.sum((logits - labels) ** 2)
    return xp.sum(xp.logaddexp(xp.zeros_like(logits), logits) - labels * logits)


def sequence_log_probs(model: LanguageModel, batch: TextChunks | PackedBatch, rng: Rng | None = None) -> Array:
    """Return the log-probability of the labels of each row, (batch,): that of an answer given its prompt.

    Args:
        model: The model.
        batch: Rows of one document each, e.g. of `PackedBatch.make(documents, xp=xp)`.
        rng: Source of dropout masks; None for no dropout.
    """
    losses = _label_losses(model, batch, rng)
    return -array_namespace(losses).sum(losses, axis=-1)


def dpo_loss(
    policy_chosen: Array, policy_rejected: Array, reference_chosen: Any, reference_rejected: Any, *, beta: float = 0.1
) -> Array:
    """Compute the loss of direct preference optimization for each pair of answers (Rafailov et al., 2023, equation 7).

    The loss is -log sigmoid(beta ((pc - pr) - (rc - rr))), of log-probabilities as `sequence_log_probs` returns them.

    Args:
        policy_chosen: Log-probabilities of the preferred answers under the model that is trained, (pairs,).
        policy_rejected: Those of the other answers.
        reference_chosen: Those of the preferred answers under the frozen model that training starts from; NumPy arrays
            and lists are moved to the library of the model.
        reference_rejected: Those of the other answers under the frozen model.
        beta: Strength of the pull toward the frozen model.

    Returns:
        Losses of shape (pairs,).

    Raises:
        ShapeError: If the shapes differ.
        ConfigError: If beta is not a positive number.
        BackendError: If log-probabilities of the policy are lists, or arrays of different libraries or devices.
    """
    check_number("beta", beta, above=0)
    xp = array_namespace(policy_chosen, policy_rejected)
    references = [
        to_library_of(x, policy_chosen, "the log-probabilities of the reference are", dtype=policy_chosen.dtype)
        for x in (reference_chosen, reference_rejected)
    ]
    shapes = [tuple(x.shape) for x in (policy_chosen, policy_rejected, *references)]
    if len(shapes[0]) != 1 or len(set(shapes)) > 1:
        raise ShapeError(f"log-probabilities have shapes {', '.join(map(str, shapes))}; expected (pairs,) for all four")
    margins = beta * ((policy_chosen - policy_rejected) - (references[0] - references[1]))
    return xp.logaddexp(xp.zeros_like(margins), -margins)


def _label_losses(model: LanguageModel, batch: Any, rng: Rng | None, **options: Any) -> Array:
    """Return the cross-entropy of each label, (batch, length)."""
    _check_batch(batch, "tokens", "labels")
    if isinstance(model, LanguageModel):  # labels would be visible to a model that is not causal
        model.check_generates()
    if isinstance(batch, PackedBatch):
        logits, labels = _packed_logits(model, batch, rng)
        return cross_entropy(logits, labels, pad_id=IGNORE_INDEX, **options)
    like = next(iter(model.named_parameters()))[1]
    xp = array_namespace(like).library
    everything = xp.ones((1, 1, 1, 1), dtype=xp.bool, device=device(like))
    return cross_entropy(model(batch.tokens, mask=everything, rng=rng), batch.labels, **options)


def _packed_logits(model: Any, batch: PackedBatch, rng: Rng | None) -> tuple[Array, Array]:
    """Return the logits and the labels of the columns that have a loss, or of all."""
    if batch.positions is None or not isinstance(model, LanguageModel):
        return model(batch.tokens, segment_ids=batch.segment_ids, rng=rng), batch.labels
    states = model.states(batch.tokens, segment_ids=batch.segment_ids, rng=rng)
    rows, length, size = states.shape
    positions, labels = (to_library_of(x, states, "the labels are") for x in (batch.positions, batch.labels))
    xp = array_namespace(states)
    starts = length * xp.arange(rows, dtype=positions.dtype, device=device(states))
    indices = xp.reshape(starts[:, None] + positions, (-1,))
    chosen = xp.reshape(xp.take(xp.reshape(states, (rows * length, size)), indices, axis=0), (rows, -1, size))
    return model.readout(chosen, norm=lambda x: x), xp.reshape(xp.take(xp.reshape(labels, (-1,)), indices), (rows, -1))


def _recorded(model: Any, load_balancing: float) -> AbstractContextManager[list[RecordedRouting]]:
    """Record the routing of a model with experts, unless the weight of its loss is 0."""
    return record_routing() if load_balancing and model.config.num_experts else nullcontext([])


def _balanced(
    losses: Array, batch: Batch | TextChunks | PackedBatch, routing: list[RecordedRouting], weight: float
) -> Array:
    """Return the sum of the losses of a batch and, for each label, of the weighted load-balancing loss."""
    xp = array_namespace(losses)
    total = xp.sum(losses)
    if not routing:
        return total
    if isinstance(batch, TextChunks):
        return total + (weight * batch.num_tokens) * load_balancing_loss(routing)
    # A compiled step has no values of `counts` and `lengths`, so the labels are counted on the device.
    if isinstance(batch, PackedBatch):
        counts, mask = batch.counts, batch.segment_ids != 0
    else:
        counts, mask = batch.lengths[:, 1], None
    count = xp.astype(xp.sum(to_library_of(counts, losses, "the numbers of labels are")), losses.dtype)
    return total + weight * count * load_balancing_loss(routing, mask)


def _divergences(first: Array, second: Array, labels: Array, pad_id: int | None) -> Array:
    """Return the mean of KL(first || second) and KL(second || first) for each label, and 0 for padding."""
    xp = array_namespace(first)
    first, second = (xp.astype(x, accumulation_dtype(xp, x.dtype), copy=False) for x in (first, second))
    # The logarithms of the denominators cancel in the sum of both.
    divergences = 0.5 * xp.sum((softmax(first) - softmax(second)) * (first - second), axis=-1)
    return divergences if pad_id is None else xp.where(labels != pad_id, divergences, xp.zeros_like(divergences))


def _check_batch(batch: Any, *names: str) -> None:
    if not all(hasattr(batch, name) for name in names):
        expected = f"a batch with {' and '.join(names)}, e.g. of TokenPairs or TextChunks"
        raise DataError(f"the loss got {describe_type(batch)} as batch; expected {expected}")


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
        DataError: If there are no batches.
        Stopped: After a signal.
    """
    batches, ranks = list(batches), communicator or SingleProcess()
    if not batches:
        raise DataError("the validation data has no batches; expected at least one")
    own = list(enumerate(batches))[ranks.rank :: ranks.size]
    num_parts = max(1, num_workers // ranks.size)

    def compute(part: list[tuple[int, Any]]) -> list[tuple[int, float]]:
        return [(number, float(loss_fn(model, batch, None))) for number, batch in until_stopped(part)]

    with blas_threads(1 if num_workers > 1 else num_threads()):
        parts = parallel_map(compute, [own[start::num_parts] for start in range(num_parts)])
    numbered = itertools.chain(*itertools.chain(*ranks.all_gather(parts)))
    return sum(loss for _, loss in sorted(numbered)) / max(1, sum(map(count_tokens, batches)))
