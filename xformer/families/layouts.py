"""Conversion between a tensor of a file and one or more parameters of a model, in both directions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

_QUERY_KEY_VALUE = ("query", "key", "value")


@dataclass(frozen=True)
class Layout:
    """The parameters that a tensor holds, and how its values are arranged.

    Tensors and parameters are NumPy arrays here. `split` and `join` are inverses.

    Attributes:
        parameters: Names of the parameters; "{i}" stands for the number of a layer, "{e}" for that of an expert.
        split: (tensor, shapes of the parameters) -> values of the parameters; views where possible.
        join: Values of the parameters -> tensor.
    """

    parameters: tuple[str, ...]
    split: Callable[[Any, Sequence[tuple[int, ...]]], Sequence[Any]]
    join: Callable[[Sequence[Any]], Any]


def same(parameter: str) -> Layout:
    """Return the layout of a tensor that equals the parameter."""
    return Layout((parameter,), lambda x, shapes: [x], lambda values: values[0])


def transposed(parameter: str) -> Layout:
    """Return the layout of a torch Linear, (out_features, in_features), or Conv1d: our weights are the transpose."""
    return Layout((parameter,), lambda x, shapes: [x.T], lambda values: values[0].T)


def linear(tensor: str, parameter: str) -> dict[str, Layout]:
    """Return the layouts of weight and bias of a torch Linear; the bias is ignored in models without it."""
    return {f"{tensor}.weight": transposed(f"{parameter}.weight"), f"{tensor}.bias": same(f"{parameter}.bias")}


def interleaved(parameter: str, head_dim: int, num_features: int) -> Layout:
    """Return the layout of a torch Linear of queries or keys whose rotary positions rotate neighboring features.

    Ours rotate the pairs (i, i + num_features / 2), see `Rotary`.

    Args:
        parameter: Weight or bias.
        head_dim: Features of a head.
        num_features: Rotated features of a head, the first ones.
    """
    even, odd = np.arange(0, num_features, 2), np.arange(1, num_features, 2)
    order = np.concatenate([even, odd, np.arange(num_features, head_dim)])

    def reordered(x: Any, indices: Any) -> Any:  # the first axis has the features of all heads
        return x.reshape(-1, head_dim, *x.shape[1:])[:, indices].reshape(x.shape)

    def split(x: Any, shapes: Sequence[tuple[int, ...]]) -> Sequence[Any]:
        return [reordered(x, order).T if x.shape[0] % head_dim == 0 else x.T]

    return Layout((parameter,), split, lambda values: reordered(values[0].T, np.argsort(order)))


def attention(
    tensor: str, parameter: str, names: str = "q_proj k_proj v_proj out_proj", *, rotated: tuple[int, int] | None = None
) -> dict[str, Layout]:
    """Return the layouts of the four torch Linears of an attention layer.

    Args:
        tensor: Prefix of the names of the tensors.
        parameter: Name of the attention layer in the model.
        names: Names of the projections of queries, keys, values and outputs in the file.
        rotated: (head_dim, num_features) if queries and keys are `interleaved`.
    """
    layouts: dict[str, Layout] = {}
    for name, part in zip(names.split(), (*_QUERY_KEY_VALUE, "output"), strict=True):
        layouts |= linear(f"{tensor}.{name}", f"{parameter}.{part}")
        if rotated is not None and part in ("query", "key"):
            for kind in ("weight", "bias"):
                layouts[f"{tensor}.{name}.{kind}"] = interleaved(f"{parameter}.{part}.{kind}", *rotated)
    return layouts


def feed_forward(tensor: str, parameter: str, names: str = "gate_proj up_proj down_proj") -> dict[str, Layout]:
    """Return the layouts of the torch Linears of a feed-forward network.

    Args:
        tensor: Prefix of the names of the tensors.
        parameter: Name of the network in the model.
        names: Names in the file of the maps gate, up and down, or of up and down.
    """
    layouts: dict[str, Layout] = {}
    parts = ("gate", "up", "down")[-len(names.split()) :]
    for name, part in zip(names.split(), parts, strict=True):
        layouts |= linear(f"{tensor}.{name}", f"{parameter}.{part}")
    return layouts


def affine(tensor: str, parameter: str) -> dict[str, Layout]:
    """Return the layouts of the weight and bias of a layer norm, or of GPT-2's Conv1D, which are stored as ours."""
    return {f"{tensor}.{name}": same(f"{parameter}.{name}") for name in ("weight", "bias")}


def fused(*parameters: str, num_heads: int = 1, transpose: bool = True) -> Layout:
    """Return the layout of several parameters that one tensor concatenates by their output features.

    Args:
        *parameters: Names in the order of the tensor; matrices or biases.
        num_heads: The tensor has the features of the first head of all parameters, then those of the second, and so on.
            The number is that of keys and values if several queries share them.
        transpose: The tensor is a torch Linear's, (all output features, in_features).
    """

    def split(x: Any, shapes: Sequence[tuple[int, ...]]) -> Sequence[Any]:
        x = x if transpose else x.T
        ends = np.cumsum([shape[-1] // num_heads for shape in shapes])
        if x.shape[0] != num_heads * ends[-1]:
            return [x.T]
        by_head = x.reshape(num_heads, -1, *x.shape[1:])  # x has one axis if it is a bias
        return [part.reshape(-1, *x.shape[1:]).T for part in np.split(by_head, ends[:-1], axis=1)]

    def join(values: Sequence[Any]) -> Any:
        parts = [value.T.reshape(num_heads, -1, *value.T.shape[1:]) for value in values]
        x = np.concatenate(parts, axis=1).reshape(-1, *values[0].T.shape[1:])
        return x if transpose else x.T

    return Layout(parameters, split, join)


def fused_linear(
    tensor: str, parameter: str, parts: str, *, num_heads: int = 1, transpose: bool = True
) -> dict[str, Layout]:
    """Return the layouts of weight and bias of a Linear that has several linear maps of a layer.

    Args:
        tensor: Name of the Linear.
        parameter: Name of the layer in the model.
        parts: Names of its linear maps in the order of the tensor.
        num_heads: As for `fused`.
        transpose: As for `fused`.
    """
    names = {kind: [f"{parameter}.{part}.{kind}" for part in parts.split()] for kind in ("weight", "bias")}
    return {f"{tensor}.{kind}": fused(*each, num_heads=num_heads, transpose=transpose) for kind, each in names.items()}


def stacked_experts(num_experts: int, *parameters: str, transpose: bool = False) -> Layout:
    """Return the layout of parameters of all experts in one tensor, whose last axis interleaves them.

    Args:
        num_experts: Number of experts, the first axis of the tensor; 0 if the model has none of the parameters.
        *parameters: Names of the parameters of an expert, with "{e}" for its number.
        transpose: The matrices are those of a torch Linear, (out_features, in_features).
    """
    names = tuple(name.replace("{e}", str(e)) for e in range(max(1, num_experts)) for name in parameters)

    def split(x: Any, shapes: Sequence[tuple[int, ...]]) -> Sequence[Any]:
        if x.shape[:1] != (num_experts,):
            return [x]  # load_pretrained raises an error for the shape
        x = x.swapaxes(1, 2) if transpose else x
        return [expert[..., i :: len(parameters)] for expert in x for i in range(len(parameters))]

    def join(values: Sequence[Any]) -> Any:
        experts = [np.stack(values[i : i + len(parameters)], axis=-1) for i in range(0, len(values), len(parameters))]
        x = np.stack(experts).reshape(num_experts, *values[0].shape[:-1], -1)
        return x.swapaxes(1, 2) if transpose else x

    return Layout(names, split, join)


def plus_one(parameter: str) -> Layout:
    """Return the layout of a norm that multiplies by 1 + weight (Gemma)."""
    return Layout((parameter,), lambda x, shapes: [x.astype(np.float64) + 1.0], lambda values: values[0] - 1)


def skip_rows(num_rows: int, parameter: str) -> Layout:
    """Return the layout of a table whose first rows are unused; xformer writes zeros there."""

    def join(values: Sequence[Any]) -> Any:
        return np.concatenate([np.zeros((num_rows, *values[0].shape[1:]), values[0].dtype), values[0]])

    return Layout((parameter,), lambda x, shapes: [x[num_rows:]], join)


def without_row_axis(parameter: str) -> Layout:
    """Return the layout of a parameter with a first axis of length 1 that the tensor does not have."""
    return Layout((parameter,), lambda x, shapes: [x[None]], lambda values: values[0][0])


def single_row(parameter: str) -> Layout:
    """Return the layout of a parameter that the tensor stores with a leading axis of length 1."""
    return Layout((parameter,), lambda x, shapes: [x[0]] if x.shape[0] == 1 else [x], lambda values: values[0][None])
