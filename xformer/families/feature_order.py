"""Permutation of the residual features, which does not change what a model computes."""

from __future__ import annotations

import numpy as np

from xformer.backends import array_namespace, device
from xformer.models.base import BaseModel
from xformer.tree import replace

# {ending of a parameter's name: its axis of residual features}
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
    """Convert sinusoidal positions to the layout "halves" of Hugging Face: all sines, then all cosines.

    In the layout "interleaved", sines and cosines alternate. The residual features are permuted accordingly, in the
    embeddings, the norms, and the inputs and outputs of all matrices. Logits stay the same up to rounding.

    Args:
        model: Any model; returned unchanged unless its sinusoidal positions are interleaved.
    """
    config = model.config
    if getattr(config, "positions", None) != "sinusoidal" or config.sinusoidal_layout != "interleaved":
        return model
    order = np.concatenate([np.arange(0, config.d_model, 2), np.arange(1, config.d_model, 2)])
    arrays = {}
    for name, x in model.named_arrays():
        xp, axis = array_namespace(x), _feature_axis(name)
        arrays[name] = x if axis is None else xp.take(x, xp.from_host(order, device=device(x)), axis=axis)
    return replace(model.with_config(sinusoidal_layout="halves"), arrays)


def _feature_axis(name: str) -> int | None:
    """Return the axis of residual features of a parameter; None if it has none."""
    if name == "output.weight":  # of the model; that of attention ends the same way
        return 0
    return next((axis for ending, axis in _AXES.items() if name.endswith(ending)), None)
