"""Scores of hypotheses: length and coverage penalties (Wu et al., 2016, section 7)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from xformer.backends import Array, array_namespace, device, from_host, to_host
from xformer.generation.batch import GenerationBatch
from xformer.generation.hypothesis import Hypothesis, length_penalty
from xformer.models.token_ids import pad, padding_mask

_MIN_ATTENTION = 1e-30  # for weights that underflowed: keeps the logarithm finite


class UnscoredHypothesis(NamedTuple):
    """A hypothesis before scoring; tokens include a prompt, has_eos says whether eos followed them."""

    input_index: int
    tokens: list[int]
    log_probability: float
    finished: bool
    has_eos: bool


def score_bound(batch: GenerationBatch, hypothesis: UnscoredHypothesis) -> float:
    """Return the score without the coverage penalty, which is at most zero."""
    length = batch.lengths.output_length(hypothesis.input_index, len(hypothesis.tokens)) + int(hypothesis.has_eos)
    config = batch.config
    return hypothesis.log_probability / length_penalty(length, config.length_penalty, config.length_penalty_base)


def score(batch: GenerationBatch, hypotheses: Sequence[UnscoredHypothesis]) -> list[Hypothesis]:
    """Score hypotheses."""
    penalties = [0.0] * len(hypotheses)
    if batch.coverage_penalties is not None and hypotheses:
        penalties = batch.coverage_penalties(hypotheses)
    return [
        Hypothesis(
            each.tokens[len(each.tokens) - batch.lengths.output_length(each.input_index, len(each.tokens)) :],
            each.log_probability,
            score_bound(batch, each) + penalty,
            each.finished,
        )
        for each, penalty in zip(hypotheses, penalties, strict=True)
    ]


class CoveragePenalty:
    """Coverage penalty of hypotheses, at most zero: beta * sum_i log(min(sum_j p_ij, 1)).

    i is a source token, j an output token, and p the attention of one teacher-forced pass, averaged over heads and
    layers.

    Args:
        model: Encoder-decoder.
        source: Source ids (inputs, source length).
        beta: Weight.
        lengths: Output lengths for a length encoding, eos included; None without one.
        source_mask: Boolean (inputs, 1, 1, source length), True = a token. Default: ids other than pad_id.
    """

    def __init__(
        self,
        model: Any,
        source: Array,
        beta: float,
        lengths: Sequence[int] | None,
        source_mask: Array | None = None,
    ) -> None:
        self.model, self.source, self.beta, self.lengths = model, source, beta, lengths
        self.source_mask = source_mask

    def __call__(self, hypotheses: Sequence[UnscoredHypothesis]) -> list[float]:
        """Return the penalty of each hypothesis."""
        config, xp = self.model.config, array_namespace(self.source)
        rows = from_host(xp, [each.input_index for each in hypotheses], dtype="int64", device=device(self.source))
        source = xp.take(self.source, rows, axis=0)
        # The last token predicts nothing unless eos follows.
        targets = [[config.bos_id, *each.tokens][: len(each.tokens) + int(each.has_eos)] for each in hypotheses]
        lengths = None if self.lengths is None else [self.lengths[each.input_index] for each in hypotheses]
        options, mask = {}, padding_mask(source, config.source_padding_id)
        if self.source_mask is not None:
            mask = options["source_mask"] = xp.take(self.source_mask, rows, axis=0)
        padded = pad(targets, config.pad_id)
        weights = mean_attention(self.model.cross_attention_weights(source, padded, lengths=lengths, **options))
        if mask is not None:  # padding has received enough attention
            weights = xp.where(mask[:, 0, :, :], weights, 1.0)
        is_token = from_host(xp, pad([[1] * len(target) for target in targets], 0), device=device(weights)) == 1
        received = to_host(xp.sum(xp.where(xp.expand_dims(is_token, axis=-1), weights, 0.0), axis=1)).tolist()
        return [
            self.beta * sum(math.log(max(min(attention, 1.0), _MIN_ATTENTION)) for attention in attentions)
            for attentions in received
        ]


def mean_attention(layers: Sequence[Array]) -> Array:
    """Return the mean over layers and heads: each (batch, heads, target, source) -> (batch, target, source)."""
    xp = array_namespace(layers[0])
    return xp.mean(xp.stack([xp.mean(weights, axis=1) for weights in layers]), axis=0)
