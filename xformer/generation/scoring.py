"""Scores of whole hypotheses: length and coverage (Wu et al., 2016, section 7)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from xformer.backends import Array, array_namespace, device, from_host, to_host
from xformer.generation.hypothesis import Hypothesis, length_penalty
from xformer.generation.task import DecodingTask
from xformer.models.token_ids import pad

_LEAST_ATTENTION = 1e-30  # a weight that underflowed; its logarithm is finite


class Path(NamedTuple):
    """A hypothesis that is still without its score."""

    sentence: int
    tokens: list[int]
    log_probability: float
    finished: bool


def score_bound(task: DecodingTask, path: Path) -> float:
    """The score without the coverage penalty, which is at most zero."""
    length = task.counted(path.sentence, len(path.tokens)) + int(path.finished)
    return path.log_probability / length_penalty(length, task.options.length_penalty)


def score(task: DecodingTask, paths: Sequence[Path]) -> list[Hypothesis]:
    """Score hypotheses."""
    penalties = coverage_penalties(task, paths) if task.options.coverage_penalty and paths else [0.0] * len(paths)
    return [
        Hypothesis(
            path.tokens[len(path.tokens) - task.counted(path.sentence, len(path.tokens)) :],
            path.log_probability,
            score_bound(task, path) + penalty,
            path.finished,
        )
        for path, penalty in zip(paths, penalties, strict=True)
    ]


def coverage_penalties(task: DecodingTask, paths: Sequence[Path]) -> list[float]:
    """cp of each hypothesis, at most zero: beta * sum_i log(min(sum_j p_ij, 1)), i a source token, j an output token.

    p is the attention of one teacher-forced pass, the mean over heads and layers.
    """
    model, config = task.model, task.model.config
    source = task.take(task.source, [path.sentence for path in paths])
    targets = [[config.bos_id, *path.tokens] for path in paths]
    if not all(path.finished for path in paths):  # the last token of one that was cut predicts nothing
        targets = [target if path.finished else target[:-1] for target, path in zip(targets, paths, strict=True)]
    lengths = None if task.lengths is None else [task.lengths[path.sentence] for path in paths]
    weights = mean_attention(model.cross_attention_weights(source, pad(targets, config.pad_id), lengths=lengths))
    xp = array_namespace(weights)
    counted = from_host(xp, pad([[1] * len(target) for target in targets], 0), device=device(weights)) == 1
    received = to_host(xp.sum(xp.where(xp.expand_dims(counted, axis=-1), weights, 0.0), axis=1)).tolist()
    tokens = to_host(source).tolist()
    return [
        task.options.coverage_penalty
        * sum(
            math.log(max(min(attention, 1.0), _LEAST_ATTENTION))
            for attention, token in zip(attentions, ids, strict=True)
            if token != config.pad_id
        )
        for attentions, ids in zip(received, tokens, strict=True)
    ]


def mean_attention(layers: Sequence[Array]) -> Array:
    """Mean over layers and heads: each (batch, heads, target, source) -> (batch, target, source)."""
    xp = array_namespace(layers[0])
    return xp.mean(xp.stack([xp.mean(weights, axis=1) for weights in layers]), axis=0)
