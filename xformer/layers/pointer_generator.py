"""Copying words from the source: the pointer-generator network (See, Liu and Manning, 2017, section 2.2)."""

from __future__ import annotations

from xformer.backends import Array, accumulation_dtype, array_namespace, device, extra
from xformer.layers.initializer import Initializer
from xformer.layers.linear import Linear
from xformer.ops import attention_weights, softmax
from xformer.tree import Module

_TINY = 1e-10  # keeps the logarithm finite where neither way gives a token any probability


class CopyHead(Module):
    """Mix the model's own distribution over the vocabulary with one over the tokens of the source.

    Where to copy from is an attention of its own, with one head, and how much to copy a gate on what it found.
    Source and target share their vocabulary.
    """

    query: Linear
    key: Linear
    gate: Linear

    def __init__(self, d_model: int, *, init: Initializer):
        self.query = Linear(d_model, d_model, init=init)
        self.key = Linear(d_model, d_model, init=init)
        self.gate = Linear(2 * d_model, 1, init=init)

    def __call__(
        self,
        x: Array,
        logits: Array,
        memory: Array,
        source: Array,
        memory_mask: Array | None,
        key: Array | None = None,
    ) -> Array:
        """Log-probabilities of every token, which take the place of logits.

        x: (rows, queries, d_model), logits: (rows, queries, vocabulary), of the decoder; memory: (sentences, keys,
        d_model), source: its ids (sentences, keys); memory_mask: (sentences, 1, 1, keys); key: self.key(memory), where
        that is known. Neighbouring rows may share a sentence, as the hypotheses of a beam do. Returns the shape of
        logits.
        """
        (rows, queries, d_model), sentences = x.shape, source.shape[0]
        vocabulary = logits.shape[-1]
        xp = array_namespace(x, logits, memory)
        wide = accumulation_dtype(xp, logits.dtype)  # probabilities of half precision would be zero too soon
        together = xp.reshape(x, (sentences, rows // max(1, sentences) * queries, d_model))
        key = self.key(memory) if key is None else key
        query, key = (xp.expand_dims(y, axis=1) for y in (self.query(together), key))
        weights = xp.squeeze(attention_weights(query, key, memory_mask), axis=1)  # (sentences, queries, keys)
        found = xp.concat([together, extra.cast_like(xp.matmul(weights, memory), memory)], axis=-1)
        gate = xp.reshape(xp.astype(self.gate(found), wide, copy=False), (rows, queries, 1))
        generate = 0.5 * (1.0 + xp.tanh(0.5 * gate))  # the logistic function
        weights = xp.astype(weights, wide, copy=False)
        copied = xp.reshape(scatter_to_vocabulary(weights, source, vocabulary), (rows, queries, vocabulary))
        invented = softmax(xp.astype(logits, wide, copy=False))
        mixed = xp.log(generate * invented + (1.0 - generate) * copied + _TINY)
        return xp.astype(mixed, logits.dtype, copy=False)


def scatter_to_vocabulary(weights: Array, source: Array, vocabulary: int) -> Array:
    """Sum the weights of equal tokens: (batch, queries, keys), ids (batch, keys) -> (batch, queries, vocabulary)."""
    batch, queries, keys = weights.shape
    xp = array_namespace(weights)
    ids = array_namespace(source)
    first = ids.reshape(ids.arange(batch, dtype=source.dtype, device=device(source)), (batch, 1)) * vocabulary
    places = ids.reshape(source + first, (batch * keys,))
    rows = xp.reshape(xp.permute_dims(weights, (0, 2, 1)), (batch * keys, queries))
    table = xp.zeros((batch * vocabulary, queries), dtype=weights.dtype, device=device(source))
    summed = extra.scatter_add(table, places, rows)
    return xp.permute_dims(xp.reshape(summed, (batch, vocabulary, queries)), (0, 2, 1))
