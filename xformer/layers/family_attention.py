"""Attention of single families of models: limits of the scores, sinks, norms of all heads, and vectors of distances."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from xformer.backends import Array, array_namespace, device, extra
from xformer.config import check_bool
from xformer.errors import ShapeError
from xformer.layers.attention import MultiHeadAttention
from xformer.layers.initializer import Init, initializer
from xformer.layers.linear import as_dtype_of
from xformer.layers.normalization import Norm
from xformer.ops.attention import Edit, visible
from xformer.ops.linear import merge_heads, split_heads


class FamilyAttention(MultiHeadAttention):
    """Multi-head attention with what single families of models add to it.

    Args:
        d_model: Features of the input and output.
        num_heads: Heads of the query.
        norm: As for `MultiHeadAttention`.
        norm_all_heads: Apply `norm` to the features of all heads together, (batch, length, heads * head_dim), instead
            (OLMo 2).
        softcap: Limit c of the scores, c tanh(score / c) (Gemma 2).
        sinks: Add a learned logit per head to the denominator of the softmax (attention sinks, gpt-oss).
        init: As for `MultiHeadAttention`.
        **options: Further arguments of `MultiHeadAttention`.
    """

    norm_all_heads: bool
    softcap: float | None
    sinks: Array | None

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        *,
        norm: Callable[..., Norm] | None = None,
        norm_all_heads: bool = False,
        softcap: float | None = None,
        sinks: bool = False,
        init: Init = None,
        **options: Any,
    ):
        init, self.norm_all_heads = initializer(init), check_bool("norm_all_heads", norm_all_heads)
        super().__init__(d_model, num_heads, norm=None if norm_all_heads else norm, init=init, **options)
        if norm is not None and norm_all_heads:
            self.query_norm, self.key_norm = (norm(x.weight.shape[1], init=init) for x in (self.query, self.key))
        self.softcap = softcap
        self.sinks = init.zeros((num_heads,)) if check_bool("sinks", sinks) else None

    def _normalized(self, x: Array, norm: Norm) -> Array:
        if not self.norm_all_heads:
            return norm(x)
        batch, heads, length, head_dim = x.shape
        rows = array_namespace(x).reshape(norm(merge_heads(x)), (batch * length, heads * head_dim))
        return split_heads(rows, (batch, length), heads)

    def _attend(self, q: Array, k: Array, v: Array, *masks: Any, edits: dict[str, Edit], **options: Any) -> Array:
        if self.sinks is not None:
            mask, bias = masks
            edits = {name: partial(_without_sinks, edit) for name, edit in edits.items()}
            if window := options.pop("window", 0):  # within which the sinks are not
                mask = visible(q, k, mask, False, window)
            k, v, *masks = self._with_sinks(k, v, mask, bias)  # type: ignore[assignment]
        return super()._attend(q, k, v, *masks, edits=edits, softcap=self.softcap, **options)

    def _weights(self, q: Array, k: Array, mask: Array | None, bias: Array | None, **options: Any) -> Array:
        if self.sinks is None:
            return super()._weights(q, k, mask, bias, softcap=self.softcap, **options)
        k, _, mask, bias = self._with_sinks(k, k, mask, bias)
        return super()._weights(q, k, mask, bias, softcap=self.softcap, **options)[..., 1:]

    def _with_sinks(
        self, k: Array, v: Array, mask: Array | None, bias: Array | None
    ) -> tuple[Array, Array, Array | None, Array]:
        """Add a first key and value of zeros, whose scores are the sinks: kernels need not know about them."""
        xp, (batch, heads, num_keys, head_dim) = array_namespace(k, self.sinks), k.shape
        options = {"dtype": k.dtype, "device": device(k)}
        k, v = (xp.concat([xp.zeros((batch, heads, 1, head_dim), **options), x], axis=2) for x in (k, v))
        scores = xp.zeros((1, self.num_heads, 1, num_keys), **options)
        scores = scores if bias is None else extra.cast_like(scores + bias, k)
        sinks = xp.broadcast_to(xp.reshape(self.sinks, (1, self.num_heads, 1, 1)), (*scores.shape[:3], 1))
        bias = xp.concat([extra.cast_like(sinks, k), scores], axis=3)
        if mask is not None:
            mask = xp.broadcast_to(mask, (*mask.shape[:-1], num_keys))
            mask = xp.concat([xp.ones((*mask.shape[:-1], 1), dtype=mask.dtype, device=device(mask)), mask], axis=-1)
        return k, v, mask, bias


def _without_sinks(edit: Edit, x: Array) -> Array:
    """Edit scores or weights after those of the sinks."""
    return array_namespace(x).concat([x[..., :1], edit(x[..., 1:])], axis=-1)


class DisentangledAttention(FamilyAttention, init=False):
    """Self-attention whose scores also depend on vectors of distances (He et al., 2021, section 3.1; DeBERTa).

    Arguments are those of `FamilyAttention`.
    """

    def __call__(self, x: Array, *, distances: Array, **options: Any) -> Array:  # type: ignore[override]
        """Attend from each token to all.

        Args:
            x: Array of shape (batch, length, d_model).
            distances: Vectors of relative positions, (2 * length - 1, d_model), from `RelativeEmbedding`.
            **options: `mask`, `causal` and `rng`, as for `MultiHeadAttention`.

        Returns:
            Array of the shape of x.
        """
        return super().__call__(x, bias=distances, **options)

    def weights(self, x: Array, *, distances: Array, **options: Any) -> Array:  # type: ignore[override]
        """Return the attention weights of each head, for inspection; arguments are those of a call."""
        return super().weights(x, bias=distances, **options)

    def _score_bias(self, distances: Array, q: Array, k: Array) -> Array:
        """Return the scores of queries and distances and of distances and keys."""
        xp, head_dim, length = array_namespace(q), q.shape[3], q.shape[2]
        if k.shape[1:] != q.shape[1:] or distances.shape[0] != 2 * length - 1:
            raise ShapeError(
                f"distances has shape {tuple(distances.shape)}, queries and keys in heads {tuple(q.shape)} and "
                f"{tuple(k.shape)}; expected as many keys as queries, and (2 length - 1, d_model)"
            )
        rows = as_dtype_of(distances, self.query.weight)[None, :, :]
        (query,), (key,) = self._project(query=rows), self._project(key=rows)
        key = xp.flip(key, axis=2)  # the distance falls with the position of the key
        to_distances = _by_position(xp.matmul(q, xp.matrix_transpose(key)))
        from_distances = xp.matrix_transpose(_by_position(xp.matmul(k, xp.matrix_transpose(query))))
        scale = head_dim**-0.5 if self.scale is None else self.scale
        return extra.cast_like((to_distances + from_distances) * scale, q)


def _by_position(scores: Array) -> Array:
    """Return [i, j - i + length - 1] at [i, j], for scores (batch, heads, length, 2 length - 1): a square matrix."""
    xp, (batch, heads, length, count) = array_namespace(scores), scores.shape
    flat = xp.reshape(xp.concat([scores, scores[:, :, :, :1]], axis=3), (batch, heads, length * (count + 1)))
    rows = flat[:, :, length - 1 : length - 1 + length * count]  # each starts one column earlier than that before it
    return xp.reshape(rows, (batch, heads, length, count))[:, :, :, :length]
