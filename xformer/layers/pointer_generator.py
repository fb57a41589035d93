"""The pointer-generator network, which copies tokens of the source (See, Liu and Manning, 2017, section 2.2)."""

from __future__ import annotations

from xformer.backends import Array, accumulation_dtype, array_namespace, device, extra
from xformer.layers.basic import Init, Linear, as_dtype_of, initializer
from xformer.ops import attention_weights, softmax
from xformer.tree import Module, check_array

_TINY = 1e-10  # keeps the logarithm finite for tokens that neither distribution contains


class CopyHead(Module):
    """Mix the decoder's distribution over the vocabulary with one over the tokens of the source.

    The copy distribution is a single-head attention to the memory; a gate computed from the decoder state and the
    attended memory weighs the two. Source and target share their vocabulary.

    Args:
        d_model: Features of decoder states and memory.
        init: Source of the initial parameters, required: an `Initializer`, or a seed for a new one on NumPy.
    """

    query: Linear
    key: Linear
    gate: Linear

    def __init__(self, d_model: int, *, init: Init = None):
        init = initializer(init)
        self.query = Linear(d_model, d_model, init=init)
        self.key = Linear(d_model, d_model, init=init)
        self.gate = Linear(2 * d_model, 1, init=init)

    def __call__(
        self, x: Array, logits: Array, memory: Array, source: Array, memory_mask: Array | None, key: Array | None = None
    ) -> Array:
        """Compute the log-probabilities of the mixture.

        Args:
            x: Decoder states (rows, queries, d_model). Neighboring rows may share a sentence, as the hypotheses of a
                beam do.
            logits: Logits of the decoder (rows, queries, vocab_size).
            memory: Output of the encoder (sentences, keys, d_model).
            source: Source ids (sentences, keys).
            memory_mask: Boolean mask of the memory (sentences, 1, 1, keys).
            key: `self.key(memory)`, if it is known.

        Returns:
            Log-probabilities in the shape and dtype of `logits`.
        """
        x, memory = as_dtype_of(x, self.query.weight), as_dtype_of(memory, self.key.weight)
        d_model = self.query.weight.shape[0]
        rows, queries, _ = check_array(x, "x", "rows", "queries", d_model)
        sentences, keys, _ = check_array(memory, "memory", "sentences", "keys", d_model)
        _, _, vocab_size = check_array(logits, "logits", rows, queries, "vocab_size")
        check_array(source, "source", sentences, keys)
        xp = array_namespace(x, logits, memory, source)
        wide = accumulation_dtype(xp, logits.dtype)  # small probabilities underflow in half precision
        grouped = xp.reshape(x, (sentences, rows // max(1, sentences) * queries, d_model))
        key = self.key(memory) if key is None else key
        query, key = (xp.expand_dims(y, axis=1) for y in (self.query(grouped), key))
        weights = xp.squeeze(attention_weights(query, key, memory_mask), axis=1)  # (sentences, queries, keys)
        context = xp.concat([grouped, extra.cast_like(xp.matmul(weights, memory), memory)], axis=-1)
        gate = xp.reshape(xp.astype(self.gate(context), wide, copy=False), (rows, queries, 1))
        p_generate = 0.5 * (1.0 + xp.tanh(0.5 * gate))  # the logistic function
        weights = xp.astype(weights, wide, copy=False)
        p_copy = xp.reshape(scatter_to_vocabulary(weights, source, vocab_size), (rows, queries, vocab_size))
        p_vocab = softmax(xp.astype(logits, wide, copy=False))
        mixture = xp.log(p_generate * p_vocab + (1.0 - p_generate) * p_copy + _TINY)
        return xp.astype(mixture, logits.dtype, copy=False)


def scatter_to_vocabulary(weights: Array, source: Array, vocab_size: int) -> Array:
    """Sum the weights (batch, queries, keys) of equal tokens of the source: (batch, queries, vocab_size)."""
    batch, queries, keys = weights.shape
    xp = array_namespace(weights)
    ids = array_namespace(source)
    first = ids.reshape(ids.arange(batch, dtype=source.dtype, device=device(source)), (batch, 1)) * vocab_size
    indices = ids.reshape(source + first, (batch * keys,))
    rows = xp.reshape(xp.permute_dims(weights, (0, 2, 1)), (batch * keys, queries))
    table = xp.zeros((batch * vocab_size, queries), dtype=weights.dtype, device=device(source))
    sums = extra.scatter_add(table, indices, rows)
    return xp.permute_dims(xp.reshape(sums, (batch, vocab_size, queries)), (0, 2, 1))
