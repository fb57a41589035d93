"""Multi-head attention (Vaswani et al., 2017, section 3.2.2)."""

from __future__ import annotations

from xformer import masks
from xformer.backends import Array, array_namespace, device
from xformer.errors import ConfigError, ShapeError
from xformer.layers.dropout import Dropout
from xformer.layers.initializer import Initializer
from xformer.layers.kv_cache import KVCache
from xformer.layers.linear import Linear
from xformer.layers.positions import Rotation
from xformer.ops import attention, attention_weights, project_heads
from xformer.ops.attention import check_mask
from xformer.ops.project_heads import Projection
from xformer.random import Rng
from xformer.tree import Module


class MultiHeadAttention(Module):
    """Attend with several heads, each on a slice of d_model / num_heads features.

    Self-attention: `layer(x, causal=True)`; cross-attention: `layer(x, memory, mask=masks.padding(source, 0))`.

    num_heads: heads of the query; it divides d_model. num_key_value_heads: heads of keys and values, each serving as
    many query heads (grouped-query attention, Ainslie et al., 2023; 1: multi-query, Shazeer, 2019); default as many.
    bias: of the four projections, (d_model, d_model) for query and output, (d_model, num_key_value_heads * head_dim)
    for key and value. dropout: on the attention weights. window: how far self-attention sees, in tokens
    (masks.sliding_window); None: everywhere.

    Raises ConfigError when the heads do not divide what they share.
    """

    query: Linear
    key: Linear
    value: Linear
    output: Linear
    dropout: Dropout
    num_heads: int
    num_key_value_heads: int
    window: int | None

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        *,
        num_key_value_heads: int | None = None,
        bias: bool = True,
        dropout: float = 0.0,
        window: int | None = None,
        init: Initializer,
    ):
        shared = num_heads if num_key_value_heads is None else num_key_value_heads
        check_heads(d_model, num_heads, shared)
        if window is not None and window < 1:
            raise ConfigError(f"window is {window}; expected at least 1 token, or None for no limit")
        head_dim = d_model // num_heads
        self.query = Linear(d_model, d_model, bias=bias, init=init)
        self.key = Linear(d_model, shared * head_dim, bias=bias, init=init)
        self.value = Linear(d_model, shared * head_dim, bias=bias, init=init)
        self.output = Linear(d_model, d_model, bias=bias, init=init)
        self.dropout = Dropout(dropout)
        self.num_heads = num_heads
        self.num_key_value_heads = shared
        self.window = window

    def __call__(
        self,
        x: Array,
        memory: Array | None = None,
        *,
        mask: Array | None = None,
        bias: Array | None = None,
        rotation: Rotation | None = None,
        causal: bool = False,
        rng: Rng | None = None,
        store: KVCache | None = None,
    ) -> Array:
        """Attend from x to memory (default: x itself).

        x: (batch, queries, d_model); memory: (batch, keys, d_model); mask: boolean, True = may attend,
        broadcastable to (batch, heads, queries, keys); bias: added to the scores, broadcastable likewise;
        rotation: turns queries and keys by their positions; causal: not later than the query, aligned at the end.
        rng: dropout on the attention weights. store: keys and values of earlier tokens, to which those of x are added
        (decoding; only without memory).
        Returns (batch, queries, d_model).
        """
        query, key, value, mask = self._project(x, memory, mask, rotation, store)
        keep, keep_probability = self.dropout.draw((*query.shape[:-1], key.shape[-2]), x, rng)
        heads = attention(
            query, key, value, mask, bias, causal=causal, keep=keep, keep_probability=keep_probability
        )  # (batch, heads, queries, head_dim)
        return self.output(merge_heads(heads))

    def attend(self, x: Array, store: KVCache, *, mask: Array | None = None) -> Array:
        """Attend to keys and values computed before (decoding: those of the memory).

        x: (rows, queries, d_model). The store may hold fewer rows, each serving as many neighboring rows of x: the
        hypotheses of a sentence share its memory. mask: broadcastable to (stored rows, heads, queries, keys).
        Returns (rows, queries, d_model).
        """
        (rows, queries, d_model), key = x.shape, store.key
        if key is None or store.value is None:
            raise ShapeError("the store is empty; fill it first with the keys_and_values of the memory")
        xp = array_namespace(x)
        # To attention, the queries of neighboring rows are just more queries of one sentence.
        together = xp.reshape(x, (key.shape[0], rows // max(1, key.shape[0]) * queries, d_model))
        (query,) = project_heads(together, self._query)
        heads = attention(query, key, store.value, mask)
        return self.output(xp.reshape(merge_heads(heads), (rows, queries, d_model)))

    def weights(
        self,
        x: Array,
        memory: Array | None = None,
        *,
        mask: Array | None = None,
        bias: Array | None = None,
        rotation: Rotation | None = None,
        causal: bool = False,
    ) -> Array:
        """The attention weights of each head, to look at: (batch, heads, queries, keys). Arguments as above."""
        query, key, _, mask = self._project(x, memory, mask, rotation)
        return attention_weights(query, key, mask, bias, causal=causal)

    def keys_and_values(self, memory: Array) -> tuple[Array, Array]:
        """The keys and values of `memory`, each (batch, key/value heads, keys, head_dim)."""
        key, value = project_heads(memory, *self._key_and_value)
        return key, value

    @property
    def _query(self) -> Projection:
        return self.query.weight, self.query.bias, self.num_heads

    @property
    def _key_and_value(self) -> tuple[Projection, Projection]:
        heads = self.num_key_value_heads
        return (self.key.weight, self.key.bias, heads), (self.value.weight, self.value.bias, heads)

    def _project(
        self,
        x: Array,
        memory: Array | None,
        mask: Array | None,
        rotation: Rotation | None,
        store: KVCache | None = None,
    ) -> tuple[Array, Array, Array, Array | None]:
        """Query, key and value in heads, and the mask with the window in it."""
        if memory is None:
            query, key, value = project_heads(x, self._query, *self._key_and_value)
        else:
            (query,) = project_heads(x, self._query)
            key, value = self.keys_and_values(memory)
        if rotation is not None:
            query, key = rotation(query), rotation(key)
        if store is not None:
            key, value = store.append(key, value)
        if self.window is not None and memory is None:
            lengths = (query.shape[2], key.shape[2])
            check_mask(mask, (*query.shape[:-1], key.shape[2]))  # while it still is what was given
            near = masks.sliding_window(*lengths, size=self.window, xp=array_namespace(x), device=device(x))
            mask = masks.combine(mask, near)
        return query, key, value, mask


def merge_heads(x: Array) -> Array:
    """(batch, heads, length, head_dim) -> (batch, length, heads * head_dim)."""
    batch, heads, length, head_dim = x.shape
    xp = array_namespace(x)
    return xp.reshape(xp.permute_dims(x, (0, 2, 1, 3)), (batch, length, heads * head_dim))


def check_heads(d_model: int, num_heads: int, num_key_value_heads: int) -> None:
    """Raise ConfigError unless the heads divide d_model, and the key/value heads the heads."""
    if num_heads < 1:
        raise ConfigError(f"num_heads is {num_heads}; expected at least 1")
    if d_model % num_heads:
        raise ConfigError(
            f"d_model {d_model} is not divisible by num_heads {num_heads}; "
            f"choose e.g. d_model {num_heads * max(1, round(d_model / num_heads))} or another num_heads"
        )
    if num_key_value_heads < 1 or num_heads % num_key_value_heads:
        raise ConfigError(
            f"num_heads {num_heads} is not divisible by num_key_value_heads {num_key_value_heads}; "
            "each key/value head serves as many query heads"
        )
