r"""Train the translator of a recipe with torch: the same initial parameters, batches and learning rates as xformer.

    xformer train --recipe docs/recipes/multi30k-de-en.toml --set model.norm=layer --set model.activation=relu \
        --set model.qk_norm=false --set model.positions=sinusoidal --out run --source train.de --target train.en ...
    python bench/torch_recipe.py run torch_run --source train.de --target train.en --steps 1500

Matrices are updated by torch.optim.Muon, the other parameters by AdamW, as `xformer.Muon` does. nn.MultiheadAttention
keeps queries, keys and values in one matrix, of which Muon makes one update. With r_drop in the recipe, each batch is
computed twice. There is no validation; the mean of the last checkpoints is written to torch_run, which
`xformer translate` reads like any other run. nn.Transformer has layer norms, ReLU and sinusoidal positions.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from baselines.torch_models import Translator
from torch import nn

import xformer as xf
from xformer.data.pairs import Batch, TokenPairs, epochs
from xformer.families.run_directory import RunDirectory
from xformer.pipelines.tokenizers import Tokenizers
from xformer.random import Rng
from xformer.runs.pairs import build_model
from xformer.runs.recipe import Recipe
from xformer.text import read_lines
from xformer.training.checkpoint import save_parameters
from xformer.tree import flatten_parameters


def main() -> None:
    """Train, and write the model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="a run of xformer train with one tokenizer for both languages")
    parser.add_argument("out", type=Path, help="directory of the new run")
    parser.add_argument("--source", type=Path, required=True, help="source text")
    parser.add_argument("--target", type=Path, required=True, help="target text")
    parser.add_argument("--steps", type=int, help="number of steps; default that of the recipe")
    arguments = parser.parse_args()
    run = RunDirectory(arguments.run)
    recipe = Recipe.from_dict(run.read_config()["recipe"])
    if arguments.steps:
        recipe = recipe.with_training(max_steps=arguments.steps)
    training = recipe.training
    if training.optimizer != "muon" or not training.keep_checkpoints:
        parser.error("expected a run with the optimizer muon and keep_checkpoints")
    if not training.max_steps or training.max_steps < training.checkpoint_interval:
        parser.error(f"expected at least {training.checkpoint_interval} steps, after which a checkpoint is kept")
    arguments.out.mkdir(parents=True)
    tokenizers = Tokenizers.load(run)
    source, target = read_lines(arguments.source), read_lines(arguments.target)
    pairs = TokenPairs(tokenizers.source.encode_batch(source), tokenizers.target.encode_batch(target))
    ours = build_model(recipe, tokenizers, np)
    start = time.perf_counter()
    average = train(Translator(ours), pairs, training, training.make_schedule(ours.config.d_model))
    print(f"{training.max_steps} steps in {(time.perf_counter() - start) / 60:.1f} minutes")
    for path in (run.config, run.tokenizer("joint")):
        shutil.copy(path, arguments.out)
    save_parameters(load_parameters(ours, average), RunDirectory(arguments.out).model)


def train(model: Translator, pairs: TokenPairs, training: Any, learning_rate: Any) -> list[Any]:
    """Return the mean parameters of the last checkpoints."""
    torch.manual_seed(training.seed)
    both = optimizers(model, training.make_optimizer())
    criterion = nn.CrossEntropyLoss(ignore_index=0, label_smoothing=training.label_smoothing)
    steps, interval = training.max_steps, training.checkpoint_interval
    kept = range(steps - steps % interval, 0, -interval)[: training.keep_checkpoints]
    total = [torch.zeros_like(parameter, dtype=torch.float64) for parameter in model.parameters()]
    rows = epochs(pairs, training.batch_tokens, Rng(training.seed).fold_in("training", "batches"))
    start = time.perf_counter()
    for step, (_, batch_rows) in enumerate(itertools.islice(rows, steps), start=1):
        batch = Batch.make(pairs, batch_rows, xp=np)
        passes = 2 if training.r_drop else 1
        source, target, labels = (torch.from_numpy(ids).repeat(passes, 1) for ids in batch[:3])
        logits = model(source, target)
        loss = criterion(logits.flatten(0, 1), labels.flatten())
        if training.r_drop:
            loss = loss + training.r_drop * divergence(logits[labels != 0]) / batch.num_tokens
        model.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), training.max_grad_norm)
        for optimizer in both:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step)
            optimizer.step()
        if step in kept:
            for mean, parameter in zip(total, model.parameters(), strict=True):
                mean += parameter.detach().double() / len(kept)
        if step % 50 == 0:
            print(
                f"step {step}  loss {loss:.3f}  {(time.perf_counter() - start) / step * 1000:.0f} ms a step", flush=True
            )
    return total


def divergence(logits: Any) -> Any:
    """Return half the mean of both Kullback-Leibler divergences between the two passes, summed over labels."""
    first, second = logits.log_softmax(-1).chunk(2)
    kl = functools.partial(nn.functional.kl_div, reduction="sum", log_target=True)
    return (kl(first, second) + kl(second, first)) / 4


def optimizers(model: nn.Module, ours: xf.Muon) -> list[torch.optim.Optimizer]:
    """Return Muon for weights, and AdamW for all other parameters, with the settings of xformer's Muon."""
    groups: dict[str, list[Any]] = {"weights": [], "embeddings": [], "vectors": []}
    for each in model.parameters():
        is_weight = each.ndim == 2 and max(each.shape) <= ours.max_aspect_ratio * min(each.shape)
        groups["weights" if is_weight else "embeddings" if each.ndim == 2 else "vectors"].append(each)
    decay = {"weight_decay": ours.weight_decay}
    others = [{"params": groups["embeddings"], **decay}, {"params": groups["vectors"], "weight_decay": 0.0}]
    return [
        torch.optim.Muon(groups["weights"], momentum=ours.momentum, adjust_lr_fn="match_rms_adamw", **decay),
        torch.optim.AdamW(others, betas=(ours.beta1, ours.beta2), eps=ours.epsilon, fused=True),
    ]


def load_parameters(ours: xf.Transformer, parameters: list[Any]) -> xf.Transformer:
    """Return xformer's model with the parameters of a `Translator`."""
    # A Translator of a model whose parameters are 0, 1, 2, ... shows where each of them is.
    leaves, rebuild = flatten_parameters(ours)
    starts = np.cumsum([0, *(leaf.size for leaf in leaves)])
    numbered = [
        start + np.arange(leaf.size).reshape(leaf.shape) for start, leaf in zip(starts[:-1], leaves, strict=True)
    ]
    places = Translator(rebuild([each.astype(np.float32) for each in numbered])).parameters()
    flat = np.full(starts[-1], np.nan, dtype=np.float32)
    for place, parameter in zip(places, parameters, strict=True):
        flat[place.detach().numpy().astype(np.int64)] = parameter.numpy()
    assert starts[-1] < 2**24, "the numbers are not exact in float32"
    assert not np.isnan(flat).any(), "a parameter is missing"
    return rebuild([flat[numbers] for numbers in numbered])


if __name__ == "__main__":
    main()
