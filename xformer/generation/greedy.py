"""Greedy search: at each step the most probable token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from xformer.errors import ConfigError
from xformer.generation.config import DecodingOptions
from xformer.generation.greedy_sampling import search_stepwise
from xformer.generation.lengths import LengthRange
from xformer.generation.task import DecodingTask
from xformer.models import Transformer


def greedy(model: Transformer, source: Any, *, max_length: int | Sequence[int] = 256) -> list[list[int]]:
    """Translate a batch of token ids; `decode` without options searches alike, with scores and limits of its own.

    source: (batch, source length) ids, padded with pad_id. max_length: most tokens of an output, eos not counted; one
    number, or one for each sentence.
    Returns one list of ids a sentence, without bos and eos. Sentences that are finished leave the batch, so a
    long one does not make the others wait. pad_id and bos_id are never chosen.

    Raises ConfigError for a max_length below one, and what the model raises for bad ids.
    """
    config = model.config
    source = model.source_ids(source)
    limits = [max_length] * source.shape[0] if isinstance(max_length, int) else list(max_length)
    if len(limits) != source.shape[0]:
        raise ConfigError(f"max_length: got {len(limits)} limits for {source.shape[0]} sentences; expected one each")
    if min(limits, default=1) < 1:
        raise ConfigError(f"max_length is {min(limits)}; expected at least 1 token")
    if not limits:
        return []
    task = DecodingTask(
        model=model,
        options=DecodingOptions(),
        begin=lambda: model.prefill(source),
        first=[config.bos_id],
        prefixes=[[] for _ in limits],
        ranges=[LengthRange(0, limit) for limit in limits],
        never=config.suppressed_ids,
        eos_id=config.eos_id,
    )
    return [hypotheses[0].tokens for hypotheses in search_stepwise(task)]
