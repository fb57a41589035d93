"""Draw the figures of docs/how-to/interpret.md: `python bench/interpret.py MODEL docs/images [FIGURE ...]`.

MODEL is a directory or a GGUF file of a language model; the published figures are those of SmolLM2-135M-Instruct.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

import xformer as xf
from xformer import interpret

FACT = "The capital of France is"
STORY = "When Mary and John went to the store, John gave a drink to"
SWAPPED = "When Mary and John went to the store, Mary gave a drink to"
ANSWER, OTHER = " Mary", " John"
DIVERGING = "RdBu_r"


class Prompts:
    """A model with the ids and labels of texts."""

    def __init__(self, path: str) -> None:
        generator = xf.TextGenerator.from_pretrained(path)
        self.model, self.tokenizer = generator.model.unpack(), generator.tokenizer

    def ids(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text))

    def labels(self, ids: Any) -> list[str]:
        return [self.tokenizer.token_bytes(int(token)).decode(errors="replace").replace("\n", "\\n") for token in ids]


def heat_map(figure: Figure, axes: Any, values: Any, title: str, *, rows: str, columns: str, label: str = "") -> None:
    """Draw a matrix: diverging colors around zero if it has negative values."""
    largest = float(np.max(np.abs(values)))
    options = {"cmap": DIVERGING, "vmin": -largest, "vmax": largest} if values.min() < 0 else {"cmap": "Blues"}
    image = axes.imshow(values, aspect="auto", origin="lower", **options)
    axes.set_title(title, fontsize=10)
    axes.set_xlabel(columns)
    axes.set_ylabel(rows)
    figure.colorbar(image, ax=axes, label=label)


def label_tokens(axes: Any, labels: list[str], *, rows: bool = False) -> None:
    axes.set_xticks(range(len(labels)), labels, rotation=60, ha="right", rotation_mode="anchor", fontsize=8)
    axes.set_xlabel("")
    if rows:
        axes.set_yticks(range(len(labels)), labels, fontsize=8)
        axes.set_ylabel("")
        axes.invert_yaxis()


def lens(prompts: Prompts) -> Figure:
    """Draw the most probable next token after each layer, and its probability."""
    ids = prompts.ids(FACT)
    logits = np.asarray(interpret.logit_lens(prompts.model, [ids]))[::3, 0]
    probabilities = np.exp(logits - logits.max(axis=-1, keepdims=True))
    probabilities /= probabilities.sum(axis=-1, keepdims=True)
    figure = Figure(figsize=(7.0, 4.2), layout="constrained")
    axes = figure.subplots()
    best = probabilities.max(axis=-1)
    heat_map(figure, axes, best, "logit lens", rows="layers applied", columns="", label="probability")
    for row, column in np.ndindex(best.shape):
        text = prompts.labels([probabilities[row, column].argmax()])[0]
        text = (text if text.strip() else repr(text)) if text.isascii() else "?"  # matplotlib's font lacks some scripts
        color = "white" if best[row, column] > 0.6 * best.max() else "black"
        axes.text(column, row, text, ha="center", va="center", fontsize=8, color=color)
    axes.set_yticks(range(len(best)), range(0, 3 * len(best), 3))
    label_tokens(axes, prompts.labels(ids))
    return figure


def attribution(prompts: Prompts) -> Figure:
    """Draw the direct parts of a difference of logits, and the effects of ablations."""
    model, ids = prompts.model, prompts.ids(STORY)
    answer, other = prompts.ids(ANSWER), prompts.ids(OTHER)
    parts = interpret.direct_logit_attribution(model, [ids], answer, other)
    metric = interpret.logit_difference(answer, other)
    figure = Figure(figsize=(9.0, 6.4), layout="constrained")
    (first, second), (third, fourth) = figure.subplots(2, 2)
    names = {"rows": "layer", "columns": "head"}
    heat_map(figure, first, np.asarray(parts.heads)[:, 0], "direct logit attribution of heads", **names)
    effects = np.asarray(interpret.head_ablation(model, [ids], metric, value="mean"))
    heat_map(figure, second, effects, "mean ablation of heads", **names)
    layers = range(len(model.layers))
    third.bar(layers, np.asarray(parts.feed_forward)[:, 0])
    third.set_title("direct logit attribution of feed-forward networks", fontsize=10)
    fourth.bar(layers, np.asarray(interpret.feed_forward_ablation(model, [ids], metric, value="mean")))
    fourth.set_title("mean ablation of feed-forward networks", fontsize=10)
    for axes in (third, fourth):
        axes.set_xlabel("layer")
        axes.set_ylabel("logit difference")
    return figure


def patching(prompts: Prompts) -> Figure:
    """Draw the effects of patches, exact and estimated."""
    model, ids, source = prompts.model, prompts.ids(SWAPPED), prompts.ids(STORY)
    metric = interpret.logit_difference(prompts.ids(ANSWER), prompts.ids(OTHER))
    figure = Figure(figsize=(9.0, 6.8), layout="constrained")
    (first, second), (third, fourth) = figure.subplots(2, 2)
    exact, estimate = (
        {part: np.asarray(analysis(model, [ids], [source], metric, part=part)) for part in ("residual", "heads")}
        for analysis in (interpret.activation_patching, interpret.attribution_patching)
    )
    heat_map(figure, first, exact["residual"], "activation patching, residual stream", rows="layer", columns="")
    heat_map(figure, second, estimate["residual"], "attribution patching, residual stream", rows="layer", columns="")
    for axes in (first, second):
        label_tokens(axes, prompts.labels(ids))
    heat_map(figure, third, exact["heads"], "activation patching, heads", rows="layer", columns="head")
    fourth.scatter(exact["heads"], estimate["heads"], s=10)
    fourth.axline((0, 0), slope=1, color="gray", linewidth=0.8)
    fourth.set(xlabel="activation patching", ylabel="attribution patching")
    fourth.set_title("heads: estimate and exact change", fontsize=10)
    return figure


def attention(prompts: Prompts) -> Figure:
    """Draw the rollout and the entropy of attention."""
    model, ids = prompts.model, prompts.ids(STORY)
    rollout = np.asarray(interpret.attention_rollout(model, [ids]))[0]
    entropy = np.asarray(interpret.attention_entropy(model, [ids]))[:, 0].mean(axis=-1)
    figure = Figure(figsize=(9.0, 3.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    # Nearly everything comes from the first token, to which heads attend that have nothing to do.
    heat_map(figure, left, rollout[1:, 1:], "attention rollout, without the first token", rows="", columns="")
    label_tokens(left, prompts.labels(ids)[1:], rows=True)
    heat_map(figure, right, entropy, "mean entropy of attention", rows="layer", columns="head", label="nats")
    return figure


def heads(prompts: Prompts) -> Figure:
    """Draw the scores of heads."""
    model = prompts.model
    scores = {
        "previous token": interpret.previous_token_scores(model, [prompts.ids(STORY)]),
        "duplicate token": interpret.duplicate_token_scores(model, [prompts.ids(STORY)]),
        "induction": interpret.induction_scores(model, length=30, batch_size=2),
    }
    figure = Figure(figsize=(9.0, 3.6), layout="constrained")
    for axes, (name, values) in zip(figure.subplots(1, 3), scores.items(), strict=True):
        heat_map(figure, axes, np.asarray(values), name, rows="layer", columns="head")
    return figure


if __name__ == "__main__":
    checkpoint, folder, *names = sys.argv[1:]
    drawn = Prompts(checkpoint)
    for draw in (lens, attention, heads, attribution, patching):
        if names and draw.__name__ not in names:
            continue
        draw(drawn).savefig(Path(folder) / f"interpret-{draw.__name__}.png", dpi=100)
        print(draw.__name__, flush=True)
