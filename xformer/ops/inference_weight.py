"""Weights that are stored in another form than a matrix, for inference."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from xformer.backends import Array
from xformer.tree import Module


class InferenceWeight(Module):
    """A matrix in another form, which linear maps and embeddings take as their weight."""

    @property
    def T(self) -> Any:
        """Transpose of the matrix; shares its arrays."""
        raise NotImplementedError

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the matrix."""
        raise NotImplementedError

    @property
    def elements(self) -> Array:
        """The array that has the elements of the matrix, before they are multiplied by the scales."""
        raise NotImplementedError

    @property
    def dtype(self) -> Any:
        """Floating dtype of the matrix, in which results are computed."""
        raise NotImplementedError

    @property
    def quantized_dtype(self) -> str | None:
        """Name of the dtype that the matrix was quantized to, or None."""
        return None

    def linear(self, rows: Array, bias: Array | None) -> Any:
        """Compute rows @ matrix + bias.

        Args:
            rows: Array of shape (rows, in_features).
            bias: Array of shape (out_features,), or None.

        Returns:
            Array of shape (rows, out_features).
        """
        raise NotImplementedError

    def take(self, indices: Array) -> Any:
        """Return rows of the matrix: (n, columns) for indices (n,)."""
        raise NotImplementedError


def inference_weights(tree: Any) -> Iterator[InferenceWeight]:
    """Yield the inference weights of a module."""
    if isinstance(tree, InferenceWeight):
        yield tree
        return
    if isinstance(tree, Module):
        children: Any = (getattr(tree, name) for name in tree.__fields__)
    else:
        children = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, tuple | list) else ()
    for child in children:
        yield from inference_weights(child)
