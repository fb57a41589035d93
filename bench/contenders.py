"""The two sides of a speed comparison, each a process of its own: `python contenders.py xformer|torch SPEC.json`.

They take the same steps on the same batches, one step for each line on standard input, and answer with the seconds
that it took. A process of its own keeps each side's thread pools, and its memory, out of the other's way; the side
that waits sleeps. Both keep freed memory (`xformer.host.keep_freed_memory`), and torch runs the fastest of its Adams.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from xformer.host import available_threads, keep_freed_memory, one_blas_thread

Step = Callable[[int], float]  # the number of a batch -> the loss, once the parameters are updated


def xformer_step(spec: dict[str, Any]) -> tuple[Step, int]:
    """One step as `xformer train` takes it: shards side by side, clipping, Adam."""
    import functools

    import numpy as np

    import xformer as xf
    from xformer.namespace import resolve
    from xformer.training.batches import Batch, TokenPairs, split_rows
    from xformer.training.loss import share_of_mean, translation_loss
    from xformer.training.optimizers import Adam
    from xformer.training.parallel import ShardedGradient
    from xformer.training.step import train_step

    workers = available_threads()
    model = xf.Transformer(xf.TransformerConfig(**spec["model"]), xp=np, seed=0)
    optimizer = Adam()
    state = optimizer.initial(model)
    pairs = TokenPairs(spec["source"], spec["target"])
    smoothed = functools.partial(translation_loss, label_smoothing=spec["label_smoothing"])
    objective = functools.partial(share_of_mean, loss=smoothed)
    gradient = ShardedGradient(objective, workers, processes=True)

    def step(number: int) -> float:
        nonlocal model, state
        rows = spec["batches"][number % len(spec["batches"])]
        shards = [Batch.make(pairs, part, xp=resolve("numpy")) for part in split_rows(rows, workers)]
        settings = {"gradient": gradient, "optimizer": optimizer, "learning_rate": 1e-4, "max_norm": spec["max_norm"]}
        result = train_step(model, state, [shards], xf.Rng(number), **settings)
        model, state = result.model, result.state
        return result.loss

    return step, model.parameter_count()


def torch_step(spec: dict[str, Any]) -> tuple[Step, int]:
    """The same step in eager torch, on nn.Transformer with embeddings and an output layer."""
    import torch
    from torch import nn
    from torch.nn.utils.rnn import pad_sequence

    warnings.simplefilter("ignore", UserWarning)  # nn.Transformer says that pre-norm has no nested tensors
    torch.manual_seed(0)
    torch.set_num_threads(available_threads())
    model = TorchTranslator(spec["model"])
    criterion = nn.CrossEntropyLoss(ignore_index=0, label_smoothing=spec["label_smoothing"])

    def make(rows: list[list[int]]) -> Any:
        return pad_sequence([torch.tensor(row) for row in rows], batch_first=True)

    def step(number: int) -> float:
        rows = spec["batches"][number % len(spec["batches"])]
        source = make([[*spec["source"][row], 2] for row in rows])
        target = make([[1, *spec["target"][row]] for row in rows])
        labels = make([[*spec["target"][row], 2] for row in rows])
        loss = criterion(model(source, target).flatten(0, 1), labels.flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        if math.isfinite(spec["max_norm"]):
            nn.utils.clip_grad_norm_(model.parameters(), spec["max_norm"])
        optimizer.step()
        return float(loss.detach())

    choices = {}
    for kind in ("for-loop", "foreach", "fused"):
        options = {} if kind == "for-loop" else {kind: True}
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, betas=(0.9, 0.98), eps=1e-9, **options)
        step(0)
        choices[min(seconds(step, number) for number in range(3))] = (kind, optimizer)
    kind, optimizer = choices[min(choices)]
    print(f"torch runs Adam {kind}", file=sys.stderr)
    return step, sum(parameter.numel() for parameter in model.parameters())


def TorchTranslator(model: dict[str, Any]) -> Any:
    """nn.Transformer, pre-norm, batches first; made in a function so that only the torch side imports torch."""
    import torch
    from torch import nn

    class Translator(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            d_model, rate = model["d_model"], model["dropout"]
            self.source = nn.Embedding(model["source_vocab_size"], d_model)
            self.target = (
                self.source if model["share_embeddings"] else nn.Embedding(model["target_vocab_size"], d_model)
            )
            layers = model["num_encoder_layers"], model["num_decoder_layers"]
            self.layers = nn.Transformer(
                d_model, model["num_heads"], *layers, model["d_ff"], rate, batch_first=True, norm_first=True
            )
            self.output = nn.Linear(d_model, model["target_vocab_size"], bias=False)
            if model["tie_output"]:
                self.output.weight = self.target.weight
            for table in {self.source, self.target}:
                nn.init.normal_(table.weight, 0.0, d_model**-0.5)
            position = torch.arange(512)[:, None]
            angle = position / 10000.0 ** (torch.arange(0, d_model, 2) / d_model)
            self.register_buffer("positions", torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(1))
            self.dropout = nn.Dropout(rate)

        def embed(self, table: Any, ids: Any) -> Any:
            return self.dropout(table(ids) * math.sqrt(table.embedding_dim) + self.positions[: ids.shape[1]])

        def forward(self, source: Any, target: Any) -> Any:
            length = target.shape[1]
            features = self.layers(
                self.embed(self.source, source),
                self.embed(self.target, target),
                tgt_mask=torch.triu(torch.ones(length, length, dtype=torch.bool), 1),
                src_key_padding_mask=source == 0,
                tgt_key_padding_mask=target == 0,
                memory_key_padding_mask=source == 0,
            )
            return self.output(features)

    return Translator()


def seconds(step: Step, number: int) -> float:
    """How long one step takes."""
    start = time.perf_counter()
    step(number)
    return time.perf_counter() - start


def main() -> None:
    """Say how many parameters the model has, then take a step for each line."""
    side, path = sys.argv[1:]
    spec = json.loads(Path(path).read_text(encoding="utf-8"))
    keep_freed_memory()
    sides = importlib.import_module(spec.get("contenders", "__main__"))
    step, parameters = {"xformer": sides.xformer_step, "torch": sides.torch_step}[side](spec)
    print(parameters, flush=True)
    # Only libraries that are loaded by now can be held to one thread. A batch that is not in shards needs all.
    with one_blas_thread() if side == "xformer" and spec.get("shards") != 1 else contextlib.nullcontext():
        for line in sys.stdin:
            print(seconds(step, int(line)), flush=True)


if __name__ == "__main__":
    main()
