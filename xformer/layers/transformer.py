"""Transformer layers: attention and feed-forward networks in residual connections (Vaswani et al., 2017, section 3)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

from xformer.backends import Array, array_namespace, extra
from xformer.backends.array_types import T
from xformer.errors import ConfigError
from xformer.layers.attention import MultiHeadAttention
from xformer.layers.basic import Dropout, LayerNorm, Norm, RMSNorm
from xformer.layers.cache import LayerCache
from xformer.layers.convolution import Conv1d
from xformer.layers.feed_forward import FeedForward, MixtureOfExperts
from xformer.ops import activation as activation_named
from xformer.ops.norms import add_norm, fuses_add_norm
from xformer.random import Rng, split_rng
from xformer.tracing.activations import is_observing, named
from xformer.tree import Module, wrong_array


def _add(x: Array, y: Array) -> Array:
    """Return x + y by the function of the namespace, which on CuPy is faster for bfloat16 than the operator."""
    return array_namespace(x, y).add(x, y)


class Sum(NamedTuple):
    """The sum x + y, or x, as layers pass it to the norm that follows, so that one kernel computes both."""

    x: Any
    y: Any = None


def carried(x: Any) -> Any:
    """Return what layers pass on in place of an array: a Sum, if the library has such a kernel."""
    return Sum(x) if type(x) is not Sum and fuses_add_norm(x) and not is_observing() else x


def total(x: Any) -> Any:
    """Return the array of a Sum, or the array itself."""
    if type(x) is not Sum:
        return x
    return x.x if x.y is None else _add(x.x, x.y)


def normalized(norm: Any, x: Any, *, keep_sum: bool = True) -> tuple[Any, Array]:
    """Return an array and its norm; of a Sum, its total as a Sum, None without `keep_sum`."""
    if type(x) is not Sum:
        return x, norm(x)
    is_known = x.y is not None and type(norm) in (LayerNorm, RMSNorm)
    if is_known and x.x.dtype == x.y.dtype == norm.weight.dtype and x.x.shape == x.y.shape:
        options = {"epsilon": norm.epsilon, "centered": type(norm) is LayerNorm, "keep_sum": keep_sum}
        both = add_norm(x.x, x.y, norm.weight, getattr(norm, "bias", None), **options)
        return (Sum(both[0]), both[1]) if keep_sum else (None, both)
    x = Sum(total(x))
    return x, norm(x.x)


def final(norm: Norm | None, x: Any) -> Array:
    """Return the output of a stack of layers, an array or a Sum, with the norm at its end, if any."""
    return total(x) if norm is None else normalized(norm, x, keep_sum=False)[1]


Sublayer = Callable[[Array], Array]


class Residual(Module):
    """Residual connection around a sublayer, with a norm and dropout.

    Args:
        norm: Norm of the input of the sublayer (`PreNorm`), of the sum (`PostNorm`) or of the output (`OutputNorm`).
        dropout: Dropout rate on the output of the sublayer.
        scale: Factor of that output.
        layer_scale: Learned factors of its features, (d_model,) (Touvron et al., 2021, section 2.1); None for none.
    """

    norm: Norm
    dropout: Dropout
    scale: float
    layer_scale: Array | None

    def __init__(self, norm: Norm, *, dropout: float = 0.0, scale: float = 1.0, layer_scale: Array | None = None):
        if not callable(norm):
            raise ConfigError(f"norm is {norm!r}; expected a layer, e.g. LayerNorm(d_model)")
        self.norm = norm
        self.dropout = Dropout(dropout)
        self.scale = scale
        self.layer_scale = layer_scale

    def add(self, x: Any, y: Array, rng: Rng | None = None) -> Any:
        """Return x + scale * layer_scale * dropout(y), for arrays of the same shape; of a Sum, a Sum."""
        y = self.dropout(y, rng)
        y = y if self.layer_scale is None else y * self.layer_scale
        y = y if self.scale == 1.0 else extra.cast_like(y * self.scale, y)
        return Sum(total(x), y) if type(x) is Sum else _add(x, y)

    def __call__(self, x: Any, sublayer: Sublayer, rng: Rng | None = None) -> Any:
        """Apply a sublayer with its residual connection.

        Args:
            x: Array of shape (batch, length, d_model), or a Sum.
            sublayer: Function of an array that returns one of the same shape.
            rng: Draws dropout.

        Returns:
            Array of the shape of `x`; a Sum if that is one.
        """
        raise NotImplementedError


class PreNorm(Residual, init=False):
    """Pre-norm residual connection, `x + dropout(f(norm(x)))` (Xiong et al., 2020).

    It trains without a careful warm-up. Arguments are those of `Residual`.
    """

    def __call__(self, x: Any, sublayer: Sublayer, rng: Rng | None = None) -> Any:
        """Apply a sublayer; see `Residual`."""
        x, y = normalized(self.norm, x)
        return self.add(x, sublayer(y), rng)


class PostNorm(Residual, init=False):
    """Post-norm residual connection, `norm(x + dropout(f(x)))` (Vaswani et al., 2017, section 3.1).

    Arguments are those of `Residual`.
    """

    def __call__(self, x: Any, sublayer: Sublayer, rng: Rng | None = None) -> Any:
        """Apply a sublayer; see `Residual`."""
        y = normalized(self.norm, self.add(x, sublayer(total(x)), rng), keep_sum=False)[1]
        return Sum(y) if type(x) is Sum else y


class OutputNorm(Residual, init=False):
    """Residual connection with a norm of the output, `x + dropout(norm(f(x)))` (Liu et al., 2022, section 3.2).

    Swin Transformer V2 introduced it, OLMo 2 has it too. Arguments are those of `Residual`.
    """

    def __call__(self, x: Any, sublayer: Sublayer, rng: Rng | None = None) -> Any:
        """Apply a sublayer; see `Residual`."""
        x = Sum(total(x)) if type(x) is Sum else x
        return self.add(x, self.norm(sublayer(total(x))), rng)


class SandwichNorm(Residual):
    """Residual connection with two norms, `x + dropout(norm_after(f(norm(x))))` (Ding et al., 2021, section 2.3).

    Args:
        norm: Norm of the input of the sublayer.
        norm_after: Norm of its output.
        **options: `dropout`, `scale` and `layer_scale` of the normalized output, as for `Residual`.
    """

    norm_after: Norm

    def __init__(self, norm: Norm, norm_after: Norm, **options: Any):
        super().__init__(norm, **options)
        self.norm_after = norm_after

    def __call__(self, x: Any, sublayer: Sublayer, rng: Rng | None = None) -> Any:
        """Apply a sublayer; see `Residual`."""
        x, y = normalized(self.norm, x)
        return self.add(x, self.norm_after(sublayer(y)), rng)


RESIDUALS = {"pre": PreNorm, "post": PostNorm, "sandwich": SandwichNorm, "output": OutputNorm}


class EncoderLayer(Module):
    """Self-attention, then feed-forward, each in a residual connection (Vaswani et al., 2017, section 3.1).

    With `causal=True` it is the layer of a decoder-only model.

    Attributes:
        self_attention: Attention of the layer.
        feed_forward: Feed-forward network of the layer, or a mixture of experts.
        self_attention_residual: Residual connection around the attention, `PreNorm` or `PostNorm`.
        feed_forward_residual: Residual connection around the feed-forward network.
    """

    __activations__: ClassVar[tuple[str, ...]] = ("residual_in", "residual_mid", "residual_out")

    self_attention: MultiHeadAttention
    feed_forward: FeedForward | MixtureOfExperts
    self_attention_residual: Residual
    feed_forward_residual: Residual

    def __call__(self, x: T, *, rng: Rng | None = None, **options: Any) -> T:
        """Apply the layer.

        Args:
            x: Array of shape (batch, length, d_model).
            rng: Draws dropout; None switches it off.
            **options: `mask`, `bias`, `rotation`, `causal` and `cache`, as for `MultiHeadAttention`.

        Returns:
            Array of the shape of `x`.
        """
        attention_rng, attention_out_rng, feed_rng, feed_out_rng = split_rng(rng, 4)
        is_sum, x = type(x) is Sum, named(self, "residual_in", carried(x))
        x = self.self_attention_residual(
            x, lambda y: self.self_attention(y, rng=attention_rng, **options), attention_out_rng
        )
        x = named(self, "residual_mid", x)
        x = self.feed_forward_residual(x, lambda y: self.feed_forward(y, feed_rng), feed_out_rng)
        return named(self, "residual_out", x if is_sum else total(x))


class ConvolutionEncoderLayer(EncoderLayer):
    """Encoder layer beside a convolution, `norm(layer(x) + activation(convolution(x)))` (He et al., 2021, DeBERTa-v2).

    Padding is zero for the convolution. Other fields and arguments are those of `EncoderLayer`.

    Attributes:
        convolution: Convolution over the tokens.
        convolution_norm: Norm of the sum.
        activation: Function of the output of the convolution, "tanh" or one of a `FeedForward`.
    """

    convolution: Conv1d
    convolution_norm: Norm
    activation: Any

    def __call__(self, x: Any, *, mask: Array | None = None, rng: Rng | None = None, **options: Any) -> Any:
        """Apply the layer; raise ShapeError for a mask of another shape than (batch, 1, 1, length)."""
        x = total(x)
        xp, (batch, length, _) = array_namespace(x), x.shape
        layer_rng, convolution_rng = split_rng(rng, 2)
        y = super().__call__(x, mask=mask, rng=layer_rng, **options)
        if mask is None:
            convolved = self.convolution(x)
        else:
            if len(mask.shape) != 4 or tuple(mask.shape[1:]) != (1, 1, length):
                raise wrong_array(mask, "mask has", f"{(batch, 1, 1, length)} for a model with a convolution")
            is_token = xp.astype(mask[:, 0, 0, :, None], x.dtype)
            convolved = self.convolution(x * is_token) * is_token
        convolved = self.feed_forward_residual.dropout(convolved, convolution_rng)
        function = xp.tanh if self.activation == "tanh" else activation_named(self.activation)
        return self.convolution_norm(_add(y, function(convolved)))


class ParallelEncoderLayer(EncoderLayer):
    """Self-attention and feed-forward side by side, `x + attention(norm(x)) + feed_forward(norm'(x))`.

    GPT-NeoX has it (Black et al., 2022). Fields and arguments are those of `EncoderLayer`, with pre-norm residual
    connections.
    """

    __activations__ = ("residual_in", "residual_out")

    def __call__(self, x: T, *, rng: Rng | None = None, **options: Any) -> T:
        """Apply the layer; see `EncoderLayer`."""
        return _side_by_side(self, self.self_attention_residual, self.feed_forward_residual, x, rng, options)


class SharedNormEncoderLayer(Module):
    """Self-attention and feed-forward side by side after one norm, `x + attention(norm(x)) + feed_forward(norm(x))`.

    Introduced with GPT-J (Wang and Komatsuzaki, 2021).

    Attributes:
        self_attention: Attention of the layer.
        feed_forward: Feed-forward network of the layer, or a mixture of experts.
        residual: Residual connection around both; its norm is before them.
    """

    __activations__ = ("residual_in", "residual_out")

    self_attention: MultiHeadAttention
    feed_forward: FeedForward | MixtureOfExperts
    residual: Residual

    def __call__(self, x: T, *, rng: Rng | None = None, **options: Any) -> T:
        """Apply the layer; arguments are those of `EncoderLayer`."""
        return _side_by_side(self, self.residual, self.residual, x, rng, options)


def _side_by_side(layer: Any, first: Residual, second: Residual, x: Any, rng: Rng | None, options: Any) -> Any:
    """Return the sum of x, the attention and the feed-forward network; one norm is computed once."""
    attention_rng, attention_out_rng, feed_rng, feed_out_rng = split_rng(rng, 4)
    is_sum, (x, y) = type(x) is Sum, normalized(first.norm, named(layer, "residual_in", carried(x)))
    attended = layer.self_attention(y, rng=attention_rng, **options)
    fed = layer.feed_forward(y if first is second else normalized(second.norm, x)[1], feed_rng)
    x = second.add(first.add(x, attended, attention_out_rng), fed, feed_out_rng)
    return named(layer, "residual_out", x if is_sum else total(x))


class DecoderLayer(Module):
    """Self-attention, cross-attention to the memory, then feed-forward, each in a residual connection.

    See Vaswani et al. (2017), section 3.1.

    Attributes:
        self_attention: Attention among the target tokens.
        cross_attention: Attention of the target tokens to the memory.
        feed_forward: Feed-forward network of the layer, or a mixture of experts.
        self_attention_residual: Residual connection around the self-attention, `PreNorm` or `PostNorm`.
        cross_attention_residual: Residual connection around the cross-attention.
        feed_forward_residual: Residual connection around the feed-forward network.
    """

    __activations__ = ("residual_in", "residual_mid", "residual_cross", "residual_out")

    self_attention: MultiHeadAttention
    cross_attention: MultiHeadAttention
    feed_forward: FeedForward | MixtureOfExperts
    self_attention_residual: Residual
    cross_attention_residual: Residual
    feed_forward_residual: Residual

    def __call__(
        self,
        x: Array,
        memory: Array,
        *,
        memory_mask: Array | None = None,
        causal: bool = True,
        rng: Rng | None = None,
        **options: Any,
    ) -> Array:
        """Apply the layer to a whole target.

        Args:
            x: Array of shape (batch, length, d_model).
            memory: Output of the encoder, (batch, keys, d_model).
            memory_mask: Boolean mask of the cross-attention, broadcastable to (batch, heads, length, keys).
            causal: Let target tokens attend to earlier ones only.
            rng: Draws dropout; None switches it off.
            **options: `mask`, `bias` and `rotation` of the self-attention, as for `MultiHeadAttention`.

        Returns:
            Array of the shape of `x`.
        """
        rngs = split_rng(rng, 6)

        def cross(y: Array) -> Array:
            return self.cross_attention(y, memory, mask=memory_mask, rng=rngs[2])

        return self._apply(x, cross, rngs, causal=causal, **options)

    def decode_step(self, x: Array, cache: LayerCache, *, memory_mask: Array | None = None, **options: Any) -> Array:
        """Apply the layer to new tokens that follow those in the cache.

        Args:
            x: Array of shape (rows, new tokens, d_model). Rows are hypotheses; neighboring rows share an input.
            cache: Keys and values of earlier tokens, to which the new ones are appended, and of the memory.
            memory_mask: Boolean mask of the memory, (inputs, 1, 1, keys).
            **options: `mask` of the cached tokens, `bias` and `rotation`, as for a call.

        Returns:
            Array of the shape of `x`.
        """

        def cross(y: Array) -> Array:
            return self.cross_attention.attend(y, cache.cross_attention, mask=memory_mask)

        return self._apply(x, cross, [None] * 6, causal=True, cache=cache.self_attention, **options)

    def _apply(self, x: Any, cross: Sublayer, rngs: Sequence[Rng | None], **options: Any) -> Any:
        """Apply the layer with a function for the cross-attention; `rngs` are those of sublayers and their outputs."""
        is_sum, x = type(x) is Sum, named(self, "residual_in", carried(x))
        x = self.self_attention_residual(x, lambda y: self.self_attention(y, rng=rngs[0], **options), rngs[1])
        x = self.cross_attention_residual(named(self, "residual_mid", x), cross, rngs[3])
        x = named(self, "residual_cross", x)
        x = self.feed_forward_residual(x, lambda y: self.feed_forward(y, rngs[4]), rngs[5])
        return named(self, "residual_out", x if is_sum else total(x))
