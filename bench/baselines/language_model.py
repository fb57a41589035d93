"""Training steps of a language model by xformer and torch, and a whole training by torch.

A round consists of several consecutive steps (settings["steps"]), as in training: a single step after a pause would
start with cold caches.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator
from typing import Any

from xformer.benchmarks.computation import Computation
from xformer.threads import num_threads

_WARM_UP = 3


def build_xformer(settings: dict[str, Any]) -> Computation:
    """Build steps as in `xformer train-lm`."""
    import numpy as np

    import xformer as xf
    from xformer.runs.config import LanguageModelTrainingConfig
    from xformer.runs.recipe import Recipe
    from xformer.runs.tasks import TextTask
    from xformer.training import AdamW
    from xformer.training.fit import TrainingLoop

    training, shards = settings["training"], settings["shards"]
    model = xf.LanguageModel(xf.LanguageModelConfig(**settings["model"]), xp=np, seed=0)
    text, sizes = np.asarray(settings["text"]), {name: training[name] for name in ("context_length", "batch_size")}
    task = TextTask(Recipe("language_modeling", training=LanguageModelTrainingConfig(**sizes)), model, text, text)
    loop = TrainingLoop(
        model,
        task.loss,
        lambda number: (batch for _, batch in task.batches(xf.Rng(0), skip=number)),
        optimizer=AdamW(**{name: training[name] for name in ("beta1", "beta2", "epsilon", "weight_decay")}),
        learning_rate=training["learning_rate"],
        max_grad_norm=training["max_grad_norm"],
        steps=_WARM_UP,
        data_parallel=shards,
        jit=True,
    )
    loop.run()

    def step(index: int) -> float:
        loop.max_steps += settings["steps"]
        loop.run()
        return float(loop.history[-1].loss)

    return Computation(step, metadata={"parameters": model.parameter_count()})


def build_torch(settings: dict[str, Any]) -> Computation:
    """Build the same steps in eager torch with its fastest AdamW."""
    import torch

    torch.manual_seed(0)
    torch.set_num_threads(num_threads())
    model = TorchLanguageModel(settings["model"])
    text = torch.tensor(settings["text"])
    training = settings["training"]

    def step(index: int) -> float:
        for _ in range(settings["steps"]):
            loss = torch_update(model, optimizer, text, training)
        return loss

    choices = {}
    for implementation in ("for-loop", "foreach", "fused"):
        optimizer = torch_adamw(model, training, implementation)
        times = []
        for _ in range(_WARM_UP):
            start = time.perf_counter()
            step(0)
            times.append(time.perf_counter() - start)
        choices[min(times)] = (implementation, optimizer)
    implementation, optimizer = choices[min(choices)]
    print(f"torch runs AdamW {implementation}", file=sys.stderr)
    return Computation(step, metadata={"parameters": sum(parameter.numel() for parameter in model.parameters())})


def torch_adamw(model: Any, settings: dict[str, Any], implementation: str) -> Any:
    """Return AdamW with weight decay for matrices only, as in nanoGPT."""
    import torch

    parameters = list(model.parameters())
    groups = [
        {"params": [each for each in parameters if each.dim() > 1], "weight_decay": settings["weight_decay"]},
        {"params": [each for each in parameters if each.dim() < 2], "weight_decay": 0.0},
    ]
    options = {} if implementation == "for-loop" else {implementation: True}
    betas = (settings["beta1"], settings["beta2"])
    return torch.optim.AdamW(groups, settings["learning_rate"], betas, settings["epsilon"], **options)


def torch_update(model: Any, optimizer: Any, text: Any, settings: dict[str, Any]) -> float:
    """Update the model on a random batch, as nanoGPT does."""
    import torch
    from torch import nn

    length, size = settings["context_length"], settings["batch_size"]
    starts = torch.randint(len(text) - length, (size,)).tolist()
    tokens, labels = (torch.stack([text[i + shift : i + shift + length] for i in starts]) for shift in (0, 1))
    loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), labels.flatten())
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), settings["max_grad_norm"])
    optimizer.step()
    return float(loss.detach())


def torch_training(
    settings: dict[str, Any], valid: list[int], implementation: str
) -> Iterator[tuple[int, float, float, float]]:
    """Train with torch; yield (step, total seconds, seconds of validation, validation loss)."""
    import torch

    torch.manual_seed(0)
    torch.set_num_threads(num_threads())
    model, text, held_out = TorchLanguageModel(settings["model"]), torch.tensor(settings["text"]), torch.tensor(valid)
    training = settings["training"]
    optimizer = torch_adamw(model, training, implementation)
    begin, validating = time.perf_counter(), 0.0
    for step in range(1, training["max_steps"] + 1):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, training)
        torch_update(model, optimizer, text, training)
        if step % training["validate_every"] == 0:
            start = time.perf_counter()
            loss = torch_validation(model, held_out, training)
            validating += time.perf_counter() - start
            yield step, time.perf_counter() - begin, validating, loss


def torch_validation(model: Any, text: Any, settings: dict[str, Any]) -> float:
    """Return the mean loss over consecutive chunks of a text."""
    import torch
    from torch import nn

    length, size = settings["context_length"], settings["batch_size"]
    total, count = 0.0, (len(text) - 1) // length
    with torch.no_grad():
        for first in range(0, count, size):
            starts = [length * i for i in range(first, min(first + size, count))]
            tokens, labels = (torch.stack([text[i + shift : i + shift + length] for i in starts]) for shift in (0, 1))
            logits = model(tokens).flatten(0, 1)
            total += float(nn.functional.cross_entropy(logits, labels.flatten(), reduction="sum"))
    return total / (count * length)


def learning_rate(step: int, settings: dict[str, Any]) -> float:
    """Return the learning rate: linear warmup, then cosine decay."""
    peak, floor, warmup_steps = settings["learning_rate"], settings["min_learning_rate"], settings["warmup_steps"]
    if step <= warmup_steps:
        return peak * step / warmup_steps
    progress = (step - warmup_steps) / (settings["max_steps"] - warmup_steps)
    return floor + (peak - floor) * 0.5 * (1.0 + math.cos(math.pi * progress))


def TorchLanguageModel(model: dict[str, Any]) -> Any:
    """Return nanoGPT's model: pre-norm, fused projections of query, key and value, fused causal attention.

    Weights are initialized as in nanoGPT: normal with deviation 0.02, divided by sqrt(2 * layers) for the last layer of
    a residual branch. The classes are local so that only the torch implementation imports torch.
    """
    from torch import nn

    d_model, heads = model["d_model"], model["num_heads"]
    attention_bias, feed_forward_bias, norm_bias = (
        model[f"{name}_bias"] for name in ("attention", "feed_forward", "norm")
    )

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention_norm = nn.LayerNorm(d_model, bias=norm_bias)
            self.feed_forward_norm = nn.LayerNorm(d_model, bias=norm_bias)
            self.projections = nn.Linear(d_model, 3 * d_model, bias=attention_bias)
            self.output = nn.Linear(d_model, d_model, bias=attention_bias)
            self.up = nn.Linear(d_model, model["d_ff"], bias=feed_forward_bias)
            self.down = nn.Linear(model["d_ff"], d_model, bias=feed_forward_bias)

        def forward(self, x: Any) -> Any:
            batch, length, _ = x.shape
            parts = self.projections(self.attention_norm(x)).split(d_model, dim=2)
            query, key, value = (part.view(batch, length, heads, -1).transpose(1, 2) for part in parts)
            y = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
            x = x + self.output(y.transpose(1, 2).reshape(batch, length, d_model))
            return x + self.down(nn.functional.gelu(self.up(self.feed_forward_norm(x))))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens = nn.Embedding(model["vocab_size"], d_model)
            self.positions = nn.Embedding(model["max_positions"], d_model)
            self.blocks = nn.Sequential(*[Block() for _ in range(model["num_layers"])])
            self.norm = nn.LayerNorm(d_model, bias=norm_bias)
            for name, parameter in self.named_parameters():
                if parameter.dim() > 1:
                    ends_branch = name.endswith(("output.weight", "down.weight"))
                    nn.init.normal_(parameter, 0.0, 0.02 / (math.sqrt(2 * model["num_layers"]) if ends_branch else 1.0))
                elif name.endswith("bias"):
                    nn.init.zeros_(parameter)

        def forward(self, tokens: Any) -> Any:
            x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
            return nn.functional.linear(self.norm(self.blocks(x)), self.tokens.weight)

    return Model()
