"""Training step: forward, backward, gradient clipping and Adam, as in `xformer train`."""

from __future__ import annotations

import contextlib
import functools
import math
from typing import Any

import numpy as np

from workloads import stacks
from xformer.benchmarks.computation import Backend, Computation
from xformer.benchmarks.interleaved import Workload, dtype_of, name_with_dtype
from xformer.data.pairs import Batch, TokenPairs
from xformer.models import Transformer, TransformerConfig
from xformer.random import Rng
from xformer.threads import blas_threads
from xformer.training.data_parallel import data_parallel, default_num_workers, is_numpy
from xformer.training.jitted_step import JittedStep, is_slower
from xformer.training.loss import translation_loss
from xformer.training.optimizers import Adam
from xformer.training.precision import autocast
from xformer.training.step import train_step

LEARNING_RATE = 1e-4


def workload(settings: dict[str, Any]) -> Workload:
    """Return the workload of one batch of sentences of equal length, without dropout or padding.

    Args:
        settings: batch, length (including the end token), heads, head_dim, layers (of each stack), vocabulary, dtype
            (of forward and backward; parameters stay in float32).
    """
    config = stacks.config(settings)
    tokens = settings["batch"] * settings["length"]
    name = (
        f"train step {settings['batch']}x{settings['length']}, {settings['layers']}+{settings['layers']} layers, "
        f"d_model {config.d_model}, vocabulary {settings['vocabulary']}"
    )
    sizes = settings["batch"], settings["length"] - 1, settings["vocabulary"]
    training = {
        "model": config.to_dict(),
        "source": stacks.sentences(*sizes, seed=0),
        "target": stacks.sentences(*sizes, seed=1),
        "batches": [list(range(settings["batch"]))],
        "label_smoothing": 0.0,
        "max_grad_norm": None,
    }
    flops = 3 * stacks.model_flops(config, tokens, settings["length"])
    return Workload(name_with_dtype(name, settings), {**settings, **training}, (tokens,), flops)


def build(settings: dict[str, Any]) -> Computation:
    """Build training steps on the batches of a text, which are prepared in advance.

    Args:
        settings: model (a configuration), source and target (token ids), batches (row numbers of each),
            label_smoothing, max_grad_norm (None: no clipping), backend, jit (whether to trace steps; by default on
            NumPy and CuPy).
    """
    backend = Backend(settings["backend"])
    xp = backend.xp
    model = Transformer(TransformerConfig(**settings["model"]), xp=xp, seed=0)
    num_workers = default_num_workers(model)
    optimizer = Adam()
    state = optimizer.init(model)
    pairs = TokenPairs(settings["source"], settings["target"])
    smoothed = functools.partial(translation_loss, label_smoothing=settings["label_smoothing"])
    computed = autocast(dtype_of(settings), smoothed)
    max_grad_norm = math.inf if settings["max_grad_norm"] is None else settings["max_grad_norm"]
    batches = [Batch.make(pairs, rows, xp=xp) for rows in settings["batches"]]

    jit = settings.get("jit", (is_numpy(model) or xp.graph_capture() is not None) and not is_slower(model))
    plain = functools.partial(train_step, donate=True, value_and_grad=data_parallel(num_workers))
    make_step = JittedStep(num_workers) if jit else plain

    def step(index: int) -> Any:
        nonlocal model, state
        batch = batches[index % len(batches)]
        result = make_step(
            model,
            state,
            [batch],
            Rng(0).with_counter(backend.array(np.asarray(index))),
            loss_fn=computed,
            optimizer=optimizer,
            learning_rate=LEARNING_RATE,
            max_grad_norm=max_grad_norm,
            num_tokens=batch.num_tokens,
        )
        model, state = result.model, result.state
        return float(result.loss) if backend.wait is None else result.loss

    metadata = {"parameters": model.parameter_count()}
    context = functools.partial(blas_threads, 1) if num_workers > 1 else contextlib.nullcontext
    return Computation(step, functools.partial(fingerprint, settings), metadata, context, backend.wait)


def fingerprint(settings: dict[str, Any], loss: Any) -> list[list[float]]:
    """Return the loss, which is the same for the same model; with random dropout, nothing."""
    return [] if settings["model"]["dropout"] else [[float(loss)]]
