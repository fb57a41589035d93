"""Change of the order of the features of the residual stream, which leaves the function of a model as it is."""

from __future__ import annotations

from typing import Any

import numpy as np

from xformer.backends import array_namespace, base_namespace, device, from_host
from xformer.models.base import BaseModel
from xformer.tree import replace

# Axes of parameters that run over the residual features, by the end of the parameter's name.
_AXES = {
    "embedding.weight": 1,
    "norm.weight": 0,
    "norm.bias": 0,
    **{f"attention.{part}.weight": 0 for part in ("query", "key", "value")},
    "attention.output.weight": 1,
    "attention.output.bias": 0,
    "feed_forward.gate.weight": 0,
    "feed_forward.up.weight": 0,
    "feed_forward.down.weight": 1,
    "feed_forward.down.bias": 0,
    "positions.weight": 1,
}


def with_separate_halves(model: BaseModel) -> BaseModel:
    """Return the same function with sinusoidal positions in the layout "halves", which Hugging Face's families have.

    Sines and cosines of other models alternate. The features of the residual stream are permuted accordingly, in the
    embeddings, the norms, and the inputs and outputs of all matrices; logits stay the same up to rounding.

    Args:
        model: Any model; one without interleaved sinusoidal positions is returned unchanged.
    """
    config = model.config
    if config.positions != "sinusoidal" or config.sinusoidal_layout != "interleaved":
        return model
    order = np.concatenate([np.arange(0, config.d_model, 2), np.arange(1, config.d_model, 2)])
    arrays = {}
    for name, x in model.named_parameters():
        axis = 0 if name == "output.weight" else next((a for end, a in _AXES.items() if name.endswith(end)), None)
        arrays[name] = x if axis is None else _take(x, order, axis)
    permuted: BaseModel = replace(model.with_config(sinusoidal_layout="halves"), arrays)
    return permuted


def _take(x: Any, order: Any, axis: int) -> Any:
    xp = array_namespace(x)
    return xp.take(x, from_host(base_namespace(xp), order, device=device(x)), axis=axis)
