"""Attention weights of a model for a text or a pair of texts, as arrays, HTML and plots."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from xformer.backends import to_host
from xformer.errors import ConfigError, DataError, check_choice, describe_type
from xformer.generation.generate import generate
from xformer.html import HeatMap, details, heat_maps, join
from xformer.models import Transformer, attention_maps
from xformer.text.extras import new_figure

_MAX_CELLS = 4_000_000  # of all heat maps in the HTML of one kind; beyond it, only means over heads
_MAX_INCHES = 40.0  # of a plot
_TITLES = {
    "cross": "cross-attention: from output to source",
    "decoder": "self-attention of the decoder",
    "encoder": "self-attention of the encoder",
}


Labels = Callable[[Any, Sequence[int]], list[str]]  # function of a tokenizer, or None, and ids


class AttentionMap(NamedTuple):
    """Attention weights of all layers and heads, with the tokens.

    Attributes:
        weights: NumPy array (layers, heads, queries, keys); rows sum to one.
        queries: Labels of the rows. In a decoder of an encoder-decoder, the row of a token is the query that predicts
            it.
        keys: Labels of the columns.
    """

    weights: Any
    queries: list[str]
    keys: list[str]


@dataclass(frozen=True, repr=False)
class Attention:
    """The attention of a model, which notebooks show as heat maps with a choice of layer and head.

    Attributes:
        maps: `AttentionMap` by kind: those of "cross", "decoder" and "encoder" that the model has.
    """

    maps: dict[str, AttentionMap]

    def plot(self, kind: str | None = None, *, layer: int = -1, head: int | None = None, title: str = "") -> Any:
        """Plot one heat map with matplotlib.

        Args:
            kind: "cross", "decoder" or "encoder". Default: the first that the model has.
            layer: Layer, counted from 0; negative numbers count from the last layer.
            head: Head, counted from 0. Default: the mean of all heads.
            title: Title of the figure.

        Returns:
            A `matplotlib.figure.Figure`.

        Raises:
            ConfigError: For a kind, layer or head that the model does not have.
            BackendError: If matplotlib is not installed.
        """
        kind = next(iter(self.maps)) if kind is None else kind
        check_choice("kind", kind, self.maps)
        weights, rows, columns = self.maps[kind]
        num_layers, num_heads = weights.shape[:2]
        if not -num_layers <= layer < num_layers:
            raise ConfigError(f"layer is {layer}; expected 0 to {num_layers - 1}")
        if head is not None and not -num_heads <= head < num_heads:
            raise ConfigError(f"head is {head}; expected 0 to {num_heads - 1}, or None for their mean")
        values = weights[layer].mean(axis=0) if head is None else weights[layer, head]
        figure = new_figure(min(2.2 + 0.55 * len(columns), _MAX_INCHES), min(1.8 + 0.42 * len(rows), _MAX_INCHES))
        axes = figure.subplots()
        image = axes.imshow(values, cmap="Blues", vmin=0.0, vmax=1.0, aspect="auto")
        axes.set_xticks(range(len(columns)), columns, rotation=45, ha="left", rotation_mode="anchor")
        axes.set_yticks(range(len(rows)), rows)
        axes.xaxis.tick_top()
        axes.set_xlabel("source token attended to" if kind == "cross" else "token attended to")
        axes.set_ylabel("token" if kind == "encoder" else "output token")
        axes.set_xticks([x + 0.5 for x in range(len(columns) - 1)], minor=True)
        axes.set_yticks([y + 0.5 for y in range(len(rows) - 1)], minor=True)
        axes.grid(which="minor", color="white", linewidth=1.0)
        axes.tick_params(which="both", length=0)
        which_layer = "last layer" if layer in (-1, num_layers - 1) else f"layer {layer % num_layers}"
        which_head = "mean of all heads" if head is None else f"head {head % num_heads}"
        figure.colorbar(image, ax=axes, label=f"attention, {which_layer}, {which_head}")
        if title:
            figure.suptitle(title)
        return figure

    def __repr__(self) -> str:
        shapes = ", ".join(f"{kind}={list(each.weights.shape)}" for kind, each in self.maps.items())
        return f"Attention({shapes})"

    def _repr_html_(self) -> str:
        """Return the heat maps as HTML, without scripts."""
        parts = []
        for index, (kind, each) in enumerate(self.maps.items()):
            num_layers, num_heads = each.weights.shape[:2]
            heads = ["mean", *map(str, range(num_heads if each.weights.size <= _MAX_CELLS else 0))]
            layers = [str(layer) for layer in reversed(range(num_layers))]  # the last one is selected
            values = np.concatenate([each.weights.mean(axis=1, keepdims=True), each.weights], axis=1)
            maps = [HeatMap(values[int(n), i].tolist(), (n, head)) for n in layers for i, head in enumerate(heads)]
            picture = heat_maps(maps, each.queries, each.keys, {"layer": layers, "head": heads})
            parts.append(details(_TITLES[kind], picture, is_open=index == 0))
        return join(parts)


def show_attention(model: Any, source: Any, target: Any = None) -> Attention:
    """Compute the attention weights of a model for a text, or a pair of texts.

    Args:
        model: A pipeline such as `Translator`, `TextGenerator` or `Embedder`; or a model, for token ids.
        source: The source, prompt or text; for a model its token ids, (length,) or (1, length).
        target: Output of an encoder-decoder: a text, or its token ids without bos and eos. Default: the output that the
            model generates. Other models take no target.

    Returns:
        The weights with the tokens; the last line of a notebook cell shows them.

    Raises:
        DataError: If the source is blank, or for ids out of range.
        ConfigError: For a target of a model without a decoder, or a model of another class.

    Examples:
        >>> from xformer.models import LanguageModel, LanguageModelConfig
        >>> config = LanguageModelConfig(vocab_size=13, d_model=8, num_heads=2, d_ff=16, num_layers=3)
        >>> show_attention(LanguageModel(config), [5, 4, 7])
        Attention(decoder=[3, 2, 3, 3])
    """
    network: Any = getattr(model, "model", model)
    is_chat = isinstance(source, list) and any(isinstance(each, Mapping) for each in source)
    is_text = model is not network and (isinstance(source, str) or is_chat)
    ids = model.input_ids(source) if is_text else _ids(source, "source")
    if not ids:
        raise DataError("source is blank; expected at least one token")
    if isinstance(network, Transformer) and network.decoder:
        if isinstance(target, str):
            if not hasattr(model, "tokenizers"):
                raise ConfigError("target is a text; expected token ids for a model, or a pipeline")
            target = model.tokenizers.encode_target([target])[0]
        output = _generate(model, ids) if target is None else _ids(target, "target")
        return token_attention(model, ids, [*output, network.config.eos_id])
    if target is not None:
        raise ConfigError(f"target was passed to {describe_type(network)} without cross-attention; expected None")
    return token_attention(model, ids)


def _labels(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """Return a label for each token: its text, or its id."""
    if tokenizer is None:
        return [str(token) for token in ids]
    texts = []
    for index, token in zip(ids, tokenizer.tokens(ids), strict=True):
        text = tokenizer.token_bytes(index).decode(errors="replace")
        texts.append(token if "\N{REPLACEMENT CHARACTER}" in text else text)
    return [text.replace("\n", "⏎").strip() or "␣" for text in texts]


def token_attention(
    model: Any, ids: Sequence[int], output: Sequence[int] = (), *, labels: Labels = _labels, layers: slice = slice(None)
) -> Attention:
    """Compute the attention weights of a model, or of a pipeline, for token ids.

    Args:
        model: The model, or its pipeline.
        ids: Ids of the source, prompt or text.
        output: Ids that a decoder predicts.
        labels: Function of a tokenizer (None for a model) and ids that returns the labels; texts of tokens.
        layers: Layers to return.
    """
    network: Any = getattr(model, "model", model)
    source, target = (getattr(model, f"{side}_tokenizer", None) for side in ("source", "target"))
    read, predicted = labels(source, ids), labels(target, output)
    inputs = model_inputs(network, ids, output)
    maps = attention_maps(network, *inputs)
    if isinstance(network, Transformer):
        tokens = {"cross": (predicted, read), "encoder": (read, read)}
        if output:
            tokens["decoder"] = predicted, labels(target, inputs[1][0])
    else:
        tokens = dict.fromkeys(maps, (read + predicted, read + predicted))
    kinds = [kind for kind in _TITLES if kind in tokens and maps[kind][layers]]
    weights = {kind: np.stack([to_host(x)[0].astype(np.float32) for x in maps[kind][layers]]) for kind in kinds}
    return Attention({kind: AttentionMap(weights[kind], *tokens[kind]) for kind in kinds})


def model_inputs(model: Any, ids: Sequence[int], output: Sequence[int] = ()) -> list[list[list[int]]]:
    """Return the arguments of a call of a model, of one row each, that reads ids and predicts an output."""
    if not isinstance(model, Transformer):
        return [[[*ids, *output]]]
    return [[list(ids)], [[model.config.bos_id, *output[:-1]]]] if output else [[list(ids)]]


def _generate(model: Any, ids: list[int]) -> list[int]:
    """Return the output of an encoder-decoder, or its pipeline, for a source."""
    if not hasattr(model, "batches_of_ids"):
        return list(generate(model, [ids])[0][0].tokens)
    encoded = ids[: len(ids) - len(model.suffix)]
    return next(result.outputs[0].tokens for batch in model.batches_of_ids([encoded]) for result in batch)


def _ids(data: Any, name: str) -> list[int]:
    """Return token ids as a list; raise DataError for anything but one sequence of integers."""
    if isinstance(data, str):
        raise DataError(f"{name} is a text; expected token ids for a model, or a pipeline for texts")
    array = np.asarray(to_host(data) if hasattr(data, "shape") else data)
    array = array[0] if array.ndim == 2 and array.shape[0] == 1 else array
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise DataError(f"{name} has shape {array.shape} and dtype {array.dtype}; expected integers of shape (length,)")
    return [int(token) for token in array]
