"""Greedy decoding: at each step the most probable token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from xformer.errors import ConfigError
from xformer.generation.cache import DecodingCache
from xformer.models import Transformer
from xformer.namespace import array_namespace, device, from_host, to_host


def greedy(model: Transformer, source: Any, *, max_length: int | Sequence[int] = 256) -> list[list[int]]:
    """Translate a batch of token ids.

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
    xp = array_namespace(source)
    memory = model.encode(source)
    cache = DecodingCache(model)
    outputs: list[list[int]] = [[] for _ in range(source.shape[0])]
    active = list(range(source.shape[0]))
    tokens = [config.bos_id] * len(active)
    while active:
        target = from_host(xp, [[token] for token in tokens], device=device(source))
        logits = model.decode(target, memory, source=source, cache=cache)[:, -1, :]
        tokens = _most_probable(logits, (config.pad_id, config.bos_id))
        for row, token in zip(active, tokens, strict=True):
            if token != config.eos_id:
                outputs[row].append(token)
        going = [
            place
            for place, (row, token) in enumerate(zip(active, tokens, strict=True))
            if token != config.eos_id and len(outputs[row]) < limits[row]
        ]
        if len(going) < len(active):
            rows = from_host(xp, going, dtype="int64", device=device(source))
            source, memory = xp.take(source, rows, axis=0), xp.take(memory, rows, axis=0)
            cache.select(rows)
            active, tokens = [active[row] for row in going], [tokens[row] for row in going]
    return outputs


def _most_probable(logits: Any, never: tuple[int, ...]) -> list[int]:
    """The best token of each row: (batch, vocabulary) -> batch ids; `never` holds ids that may not be chosen."""
    xp = array_namespace(logits)
    vocabulary = xp.arange(logits.shape[-1], device=device(logits))
    for token in never:
        logits = xp.where(vocabulary == token, -float("inf"), logits)
    return to_host(xp.argmax(logits, axis=-1)).tolist()  # type: ignore[no-any-return]
