"""A train step: forward, backward, clipping, Adam, as `xformer train` takes it."""

from __future__ import annotations

import contextlib
import functools
import math
from typing import Any

from xformer.benchmarks import stacks
from xformer.benchmarks.interleaved import Case, dtype_of, in_dtype
from xformer.benchmarks.workload import Library, Work
from xformer.data.pairs import Batch, TokenPairs, split_rows
from xformer.models import Transformer, TransformerConfig
from xformer.random import Rng
from xformer.threads import blas_threads, num_threads
from xformer.training.data_parallel import ShardedGradient, shards_for
from xformer.training.loss import translation_loss, weighted_loss
from xformer.training.optimizers import Adam
from xformer.training.precision import autocast
from xformer.training.step import train_step

LEARNING_RATE = 1e-4


def case(settings: dict[str, Any]) -> Case:
    """The case of one batch of sentences of one length, the end included, without dropout or padding.

    settings: batch, length, heads, head_dim, layers (of each stack), vocabulary; dtype, if it is not float32: that of
    forward and backward, the parameters staying in float32.
    """
    config = stacks.config(settings)
    tokens = settings["batch"] * settings["length"]
    name = (
        f"train step {settings['batch']}x{settings['length']}, {settings['layers']}+{settings['layers']} layers, "
        f"d_model {config.d_model}, vocabulary {settings['vocabulary']}"
    )
    sizes = settings["batch"], settings["length"] - 1, settings["vocabulary"]
    text = {
        "model": config.to_dict(),
        "source": stacks.sentences(*sizes, seed=0),
        "target": stacks.sentences(*sizes, seed=1),
        "batches": [list(range(settings["batch"]))],
        "label_smoothing": 0.0,
        "max_grad_norm": None,
    }
    flops = 3 * stacks.model_flops(config, tokens, settings["length"])
    return Case(in_dtype(name, settings), {**settings, **text}, (tokens,), flops)


def work(settings: dict[str, Any]) -> Work:
    """Steps on the batches of a text, one after the other, which are made before.

    settings: model (a configuration), source and target (token ids), batches (rows of each), label_smoothing, max_grad_norm
    (None: no clipping), backend.
    """
    xp = Library(settings["backend"]).xp
    model = Transformer(TransformerConfig(**settings["model"]), xp=xp, seed=0)
    workers = shards_for(model, num_threads())
    optimizer = Adam()
    state = optimizer.init(model)
    pairs = TokenPairs(settings["source"], settings["target"])
    smoothed = functools.partial(translation_loss, label_smoothing=settings["label_smoothing"])
    computed = autocast(dtype_of(settings), smoothed)
    objective = functools.partial(weighted_loss, loss=computed)
    gradient = ShardedGradient(objective, workers, processes=True)
    max_grad_norm = math.inf if settings["max_grad_norm"] is None else settings["max_grad_norm"]
    batches = [[Batch.make(pairs, part, xp=xp) for part in split_rows(rows, workers)] for rows in settings["batches"]]

    def step(number: int) -> float:
        nonlocal model, state
        how: dict[str, Any] = {"gradient": gradient, "optimizer": optimizer, "learning_rate": LEARNING_RATE}
        result = train_step(
            model, state, [batches[number % len(batches)]], Rng(number), **how, max_grad_norm=max_grad_norm
        )
        model, state = result.model, result.state
        return result.loss

    facts = {"parameters": model.parameter_count()}
    around = functools.partial(blas_threads, 1) if workers > 1 else contextlib.nullcontext
    return Work(step, functools.partial(digest, settings), facts, around)


def digest(settings: dict[str, Any], loss: float) -> list[Any]:
    """The first loss, which tells whether the model is the same; where dropout is drawn, nothing."""
    return [] if settings["model"]["dropout"] else [float(loss)]
