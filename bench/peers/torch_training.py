"""torch's train step on nn.Transformer with the weights of ours, with whichever of its Adams is fastest here."""

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

import xformer as xf
from peers.torch_models import Translator
from peers.torch_support import position_terms
from xformer.benchmarks import Work
from xformer.benchmarks.training import LEARNING_RATE, digest

ADAMS: dict[str, dict[str, bool]] = {"for-loop": {}, "foreach": {"foreach": True}, "fused": {"fused": True}}
_TRIALS = 3


def work(settings: dict[str, Any]) -> Work:
    """Steps on the batches of a text; settings are those of xformer.benchmarks.training.work, and compiled."""
    warnings.simplefilter("ignore", UserWarning)  # nn.Transformer says that pre-norm has no nested tensors
    torch.manual_seed(0)
    device, dtype = position_terms(settings).values()
    model = Translator(xf.Transformer(xf.TransformerConfig(**settings["model"]), xp="numpy", seed=0)).to(device)
    apply = torch.compile(model) if settings.get("compiled") else model
    criterion = nn.CrossEntropyLoss(ignore_index=0, label_smoothing=settings["label_smoothing"])
    batches = [[ids.to(device) for ids in make_batch(settings, rows)] for rows in settings["batches"]]

    def make(**kind: bool) -> Callable[[int], float]:
        optimizer = torch.optim.Adam(model.parameters(), LEARNING_RATE, betas=(0.9, 0.98), eps=1e-9, **kind)

        def step(number: int) -> float:
            source, target, labels = batches[number % len(batches)]
            with torch.autocast(device, dtype, enabled=dtype != torch.float32):  # parameters stay in float32
                loss = criterion(apply(source, target).flatten(0, 1), labels.flatten())
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            if settings["max_grad_norm"] is not None:
                nn.utils.clip_grad_norm_(model.parameters(), settings["max_grad_norm"])
            optimizer.step()
            return float(loss.detach())

        return step

    step = fastest(model, make)
    facts = {"parameters": sum(parameter.numel() for parameter in model.parameters())}
    return Work(step, functools.partial(digest, settings), facts)


def make_batch(settings: dict[str, Any], rows: list[int]) -> list[Any]:
    """Source, the decoder's input and its labels, padded, as our own batches have them."""
    source = [[*settings["source"][row], 2] for row in rows]
    target = [[1, *settings["target"][row]] for row in rows]
    labels = [[*settings["target"][row], 2] for row in rows]
    return [pad_sequence([torch.tensor(row) for row in ids], batch_first=True) for ids in (source, target, labels)]


def fastest(model: nn.Module, make: Callable[..., Callable[[int], float]]) -> Callable[[int], float]:
    """The step with the fastest of torch's Adams; the model is afterwards what it was."""
    before, found = copy.deepcopy(model.state_dict()), {}
    for name, kind in ADAMS.items():
        step = make(**kind)
        step(0)  # the optimizer makes its state
        times = []
        for number in range(_TRIALS):
            start = time.perf_counter()
            step(number)
            times.append(time.perf_counter() - start)
        found[min(times)] = name
    best = found[min(found)]
    model.load_state_dict(before)
    model.zero_grad(set_to_none=True)
    print(f"torch runs Adam {best}", file=sys.stderr)
    return make(**ADAMS[best])
