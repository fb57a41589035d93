"""Training steps of nn.Transformer by torch with its fastest Adam and the weights of xformer's Transformer."""

from __future__ import annotations

import copy
import functools
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from workloads.training import LEARNING_RATE, fingerprint

import xformer as xf
from baselines.torch_models import Translator
from baselines.torch_support import compiled, device_and_dtype, wait_for
from xformer.benchmarks.computation import Computation

ADAMS: dict[str, dict[str, bool]] = {"for-loop": {}, "foreach": {"foreach": True}, "fused": {"fused": True}}
_TRIALS = 3


def build(settings: dict[str, Any]) -> Computation:
    """Build training steps; settings as in workloads.training.build, and compiled."""
    warnings.simplefilter("ignore", UserWarning)  # nn.Transformer warns that pre-norm does not support nested tensors
    torch.manual_seed(0)
    device, dtype = device_and_dtype(settings).values()
    model = Translator(xf.Transformer(xf.TransformerConfig(**settings["model"]), xp="numpy", seed=0)).to(device)
    criterion = nn.CrossEntropyLoss(ignore_index=0, label_smoothing=settings["label_smoothing"])

    def loss_of(source: Any, target: Any, labels: Any) -> Any:
        return criterion(model(source, target).flatten(0, 1), labels.flatten())

    forward = compiled(loss_of, settings)
    batches = [[ids.to(device) for ids in make_batch(settings, rows)] for rows in settings["batches"]]

    def make(**options: bool) -> Callable[[int], Any]:
        optimizer = torch.optim.Adam(model.parameters(), LEARNING_RATE, betas=(0.9, 0.98), eps=1e-9, **options)

        def step(index: int) -> Any:
            with torch.autocast(device, dtype, enabled=dtype != torch.float32):  # parameters stay in float32
                loss = forward(*batches[index % len(batches)])
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            if settings["max_grad_norm"] is not None:
                nn.utils.clip_grad_norm_(model.parameters(), settings["max_grad_norm"])
            optimizer.step()
            return loss.detach()

        return step

    step = fastest(model, make)
    metadata = {"parameters": sum(parameter.numel() for parameter in model.parameters())}
    return Computation(step, functools.partial(fingerprint, settings), metadata, wait=wait_for(device))


def make_batch(settings: dict[str, Any], rows: list[int]) -> list[Any]:
    """Return source, decoder input and labels, padded, as in xformer's batches."""
    source = [[*settings["source"][row], 2] for row in rows]
    target = [[1, *settings["target"][row]] for row in rows]
    labels = [[*settings["target"][row], 2] for row in rows]
    return [pad_sequence([torch.tensor(row) for row in ids], batch_first=True) for ids in (source, target, labels)]


def fastest(model: nn.Module, make: Callable[..., Callable[[int], Any]]) -> Callable[[int], Any]:
    """Return the step with the fastest of torch's Adam implementations, and restore the model."""
    initial, names = copy.deepcopy(model.state_dict()), {}
    for name, options in ADAMS.items():
        step = make(**options)
        float(step(0))  # initializes the state of the optimizer
        times = []
        for index in range(_TRIALS):
            start = time.perf_counter()
            float(step(index))  # waits for the result
            times.append(time.perf_counter() - start)
        names[min(times)] = name
    best = names[min(names)]
    model.load_state_dict(initial)
    model.zero_grad(set_to_none=True)
    print(f"torch runs Adam {best}", file=sys.stderr)
    return make(**ADAMS[best])
