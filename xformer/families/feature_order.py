"""Permutation of the residual features, which does not change what a model computes."""

from __future__ import annotations

import numpy as np

from xformer.backends import array_namespace, device
from xformer.models.base import BaseModel
from xformer.tree import replace

# Endings of the names of parameters whose first axis has the residual features, and of those whose second one has them
_FIRST = """
norm.weight norm.bias attention.query.weight attention.key.weight attention.value.weight attention.output.bias
feed_forward.gate.weight feed_forward.up.weight feed_forward.down.bias
"""
_SECOND = "embedding.weight attention.output.weight feed_forward.down.weight positions.weight"


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
    return next((axis for axis, ends in enumerate((_FIRST, _SECOND)) if name.endswith(tuple(ends.split()))), None)
