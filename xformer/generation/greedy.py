"""Greedy decoding: at each step the most probable token."""

from __future__ import annotations

from typing import Any

from xformer.errors import ConfigError
from xformer.generation.cache import DecodingCache
from xformer.models import Transformer
from xformer.namespace import array_namespace, device, from_host, to_host


def greedy(model: Transformer, source: Any, *, max_length: int = 256) -> list[list[int]]:
    """Translate a batch of token ids.

    source: (batch, source length) ids, padded with pad_id. max_length: most tokens of an output, eos not counted.
    Returns one list of ids a sentence, without bos and eos. Sentences that are finished leave the batch, so a
    long one does not make the others wait. pad_id and bos_id are never chosen.

    Raises ConfigError for a max_length below one, and what the model raises for bad ids.
    """
    if max_length < 1:
        raise ConfigError(f"max_length is {max_length}; expected at least 1 token")
    config = model.config
    source = model.source_ids(source)
    xp = array_namespace(source)
    memory = model.encode(source)
    cache = DecodingCache(model)
    outputs: list[list[int]] = [[] for _ in range(source.shape[0])]
    active = list(range(source.shape[0]))
    tokens = [config.bos_id] * len(active)
    for _ in range(max_length):
        if not active:
            break
        target = from_host(xp, [[token] for token in tokens], device=device(source))
        logits = model.decode(target, memory, source=source, cache=cache)[:, -1, :]
        cache.length += 1
        tokens = _most_probable(logits, (config.pad_id, config.bos_id))
        going = [row for row, token in enumerate(tokens) if token != config.eos_id]
        for row in going:
            outputs[active[row]].append(tokens[row])
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
