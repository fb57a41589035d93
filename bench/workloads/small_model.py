"""Forward pass and gradient of a whole model, which for a small model are mostly overhead."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

import xformer as xf
from workloads.stacks import config, model_flops, sentences
from xformer.backends import array_namespace
from xformer.benchmarks import computation
from xformer.benchmarks.computation import Backend, Computation
from xformer.benchmarks.interleaved import Workload


def workload(settings: dict[str, Any]) -> Workload:
    """Return the workload of a batch; settings: batch, length, heads, head_dim, layers, vocabulary, gradient."""
    model_config, tokens = config(settings), settings["batch"] * settings["length"]
    layers = f"{settings['layers']}+{settings['layers']} layers"
    computed, passes = ("loss and gradient", 3) if settings.get("gradient") else ("forward", 1)
    name = f"model {settings['batch']}x{settings['length']}, {layers}, d_model {model_config.d_model}, {computed}"
    return Workload(name, settings, (tokens,), passes * model_flops(model_config, tokens, settings["length"]))


def make_ids(settings: dict[str, Any]) -> list[Any]:
    """Return source and target, and labels with a gradient, as NumPy arrays of shape (batch, length)."""
    sizes = settings["batch"], settings["length"], settings["vocabulary"]
    return [np.asarray(sentences(*sizes, seed=seed)) for seed in range(3 if settings.get("gradient") else 2)]


def fingerprint(result: Any) -> list[list[float]]:
    """Return the loss: libraries order gradients differently."""
    return computation.fingerprint(result[:1])


def _loss(model: Any, source: Any, target: Any, labels: Any) -> Any:
    losses = xf.ops.cross_entropy(model(source, target), labels, pad_id=0)
    return array_namespace(losses).mean(losses)


def build(settings: dict[str, Any]) -> Computation:
    """Build the computation by xformer on settings["backend"], by `xf.jit` with settings["jit"]."""
    backend = Backend(settings["backend"])
    model = xf.Transformer(config(settings), xp=backend.xp, seed=0)
    arrays = [backend.array(side) for side in make_ids(settings)]
    metadata = {"parameters": model.parameter_count()}
    if settings.get("gradient"):
        function = xf.value_and_grad(_loss)
    else:

        def function(model: Any, *ids: Any) -> Any:
            return (model(*ids),)

    if settings.get("jit"):
        function = xf.jit(function)
    result = backend.computation(function, model, *arrays, metadata=metadata)
    return replace(result, fingerprint=fingerprint) if settings.get("gradient") else result
