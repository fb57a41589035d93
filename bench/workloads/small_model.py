"""Forward pass of a whole model, which for a small model is mostly overhead."""

from __future__ import annotations

from typing import Any

import numpy as np

import xformer as xf
from xformer.benchmarks import Backend, Computation, Workload
from xformer.benchmarks.stacks import config, model_flops, sentences


def workload(settings: dict[str, Any]) -> Workload:
    """Return the workload of a batch; settings: batch, length, heads, head_dim, layers, vocabulary."""
    model_config, tokens = config(settings), settings["batch"] * settings["length"]
    layers = f"{settings['layers']}+{settings['layers']} layers"
    name = f"model {settings['batch']}x{settings['length']}, {layers}, d_model {model_config.d_model}, forward"
    return Workload(name, settings, (tokens,), model_flops(model_config, tokens, settings["length"]))


def make_ids(settings: dict[str, Any]) -> list[Any]:
    """Return source and target as NumPy arrays of shape (batch, length)."""
    sizes = settings["batch"], settings["length"], settings["vocabulary"]
    return [np.asarray(sentences(*sizes, seed=seed)) for seed in (0, 1)]


def build(settings: dict[str, Any]) -> Computation:
    """Build the forward pass by xformer on settings["backend"]."""
    backend = Backend(settings["backend"])
    model = xf.Transformer(config(settings), xp=backend.xp, seed=0)
    arrays = [backend.array(side) for side in make_ids(settings)]
    metadata = {"parameters": model.parameter_count()}
    return backend.computation(
        lambda model, source, target: (model(source, target),), model, *arrays, metadata=metadata
    )
