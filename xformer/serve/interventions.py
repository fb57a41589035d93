"""Changes that requests make in a model: parts that are switched off, and rows of attention weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, reduce
from typing import Any

import numpy as np

from xformer.backends import array_namespace, device
from xformer.errors import ConfigError, DataError
from xformer.interpret.patching import replaced
from xformer.pipelines.base import Pipeline
from xformer.serve import schema


def interventions(
    pipeline: Pipeline, ablations: Sequence[schema.Ablation], rows: Sequence[schema.AttentionRow] = ()
) -> dict[str, Callable[[Any], Any]]:
    """Return the argument of `xformer.intervene` for the changes of a request.

    Args:
        pipeline: Pipeline of the model.
        ablations: Parts that add nothing.
        rows: Rows of attention weights, which are normalized.

    Raises:
        ConfigError: For a part that the model does not have.
        DataError: For invalid weights.
    """
    changes: dict[str, list[Callable[[Any], Any]]] = {}
    for ablation in ablations:
        name, number = _module(pipeline, ablation), ablation.head
        change = _zeros if number is None else replaced(number, _zeros)
        changes.setdefault(f"{name}.{'output' if number is None else 'heads'}", []).append(change)
    for row in rows:
        changes.setdefault(f"{_module(pipeline, row)}.weights", []).append(_with_row(row))
    return {name: partial(reduce, lambda x, change: change(x), each) for name, each in changes.items()}


def layers_name(pipeline: Pipeline, kind: str) -> str:
    """Return the name of the layers with a kind of attention: an attribute of the model."""
    return ("encoder" if kind == "encoder" else "decoder") if pipeline.has_source else "layers"


def _module(pipeline: Pipeline, part: schema.Ablation | schema.AttentionRow) -> str:
    """Return the name of the module that a part of the model is."""
    kinds = pipeline.attention_kinds
    if part.kind not in kinds:
        raise ConfigError(f"kind is {part.kind!r}; expected any of {', '.join(kinds)}")
    layers = layers_name(pipeline, part.kind)
    for name, size in (("layer", len(getattr(pipeline.model, layers))), ("head", pipeline.model.config.num_heads)):
        if (value := getattr(part, name)) is not None and value >= size:
            raise ConfigError(f"{name} is {value}; expected 0 to {size - 1}")
    if isinstance(part, schema.Ablation) and part.part == "feed_forward":
        if part.head is not None or part.kind == "cross":
            raise ConfigError("a feed_forward part has no head, and kind 'encoder' or 'decoder'")
        return f"{layers}.{part.layer}.feed_forward"
    return f"{layers}.{part.layer}.{'cross' if part.kind == 'cross' else 'self'}_attention"


def _zeros(x: Any) -> Any:
    return array_namespace(x).zeros_like(x)


def _with_row(row: schema.AttentionRow) -> Callable[[Any], Any]:
    weights = np.asarray(row.weights, np.float64)
    if not np.isfinite(total := weights.sum()) or total <= 0:
        raise DataError(f"weights sum to {total:g}; expected a positive number")

    def change(x: Any) -> Any:
        num_queries, num_keys = x.shape[2:]
        if row.query >= num_queries:
            raise DataError(f"query is {row.query}; expected 0 to {num_queries - 1}")
        if len(weights) != num_keys:
            raise DataError(f"weights has {len(weights)} numbers; expected {num_keys}, one for each key")
        if row.kind == "decoder" and weights[row.query + 1 :].any():
            raise DataError(f"weights has some after key {row.query}; expected 0 for tokens after the query")
        xp, mask = array_namespace(x), np.zeros((1, x.shape[1], num_queries, 1), bool)
        mask[:, slice(None) if row.head is None else row.head, row.query] = True
        new = xp.from_host(weights / total, dtype=x.dtype, device=device(x))
        return xp.where(xp.from_host(mask, device=device(x)), new, x)

    return change
