"""The forward pass of a whole model: of a small one, that is mostly overhead."""

from __future__ import annotations

from typing import Any

import numpy as np

import xformer as xf
from xformer.benchmarks import Case, Library, Work
from xformer.benchmarks.stacks import config, model_flops, sentences


def case(settings: dict[str, Any]) -> Case:
    """The case of a batch, logits included. settings: batch, length, heads, head_dim, layers, vocabulary."""
    made, tokens = config(settings), settings["batch"] * settings["length"]
    layers = settings["layers"]
    name = f"model {settings['batch']}x{settings['length']}, {layers}+{layers} layers, d_model {made.d_model}, forward"
    return Case(name, settings, (tokens,), model_flops(made, tokens, settings["length"]))


def ids(settings: dict[str, Any]) -> list[Any]:
    """Source and target, in NumPy: (batch, length) each."""
    sizes = settings["batch"], settings["length"], settings["vocabulary"]
    return [np.asarray(sentences(*sizes, seed=seed)) for seed in (0, 1)]


def work(settings: dict[str, Any]) -> Work:
    """By xformer, on the library that settings["backend"] names."""
    library = Library(settings["backend"])
    model = xf.Transformer(config(settings), xp=library.xp, seed=0)
    arrays = [library.array(side) for side in ids(settings)]
    facts = {"parameters": model.parameter_count()}
    return library.work(lambda model, source, target: (model(source, target),), model, *arrays, facts=facts)
