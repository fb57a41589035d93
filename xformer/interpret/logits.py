"""Analyses of where logits come from."""

from __future__ import annotations

from collections.abc import Callable
from numbers import Integral
from typing import Any, NamedTuple

import numpy as np

from xformer.backends import Array, array_namespace, device, to_host
from xformer.errors import ConfigError, DataError
from xformer.interpret.checks import check_model
from xformer.layers import LayerNorm, RMSNorm
from xformer.models import LanguageModel
from xformer.models.token_ids import check_tokens
from xformer.ops.linear import merge_heads
from xformer.tracing import vjp
from xformer.tracing.activations import record
from xformer.tree import is_array


def logit_lens(model: LanguageModel, tokens: Any) -> Array:
    """Apply the final norm and the output projection to the residual stream of each layer.

    The logits show at which layer a prediction appears (nostalgebraist, 2020, "interpreting GPT: the logit lens").

    Args:
        model: Language model.
        tokens: Ids (batch, length).

    Returns:
        Array (layers + 1, batch, length, vocab_size): the logits of the input of each layer, and of the output of the
        last one, which are the logits of the model.

    Raises:
        ConfigError: If the model has another class.
    """
    check_model(model, LanguageModel)
    with record(model, ["layers.*.residual_in", f"layers.{len(model.layers) - 1}.residual_out"]) as activations:
        model(tokens)
    logits = [model.readout(x) for x in activations.values()]
    return array_namespace(*logits).stack(logits)


class LogitAttribution(NamedTuple):
    """The parts that add up to a logit, or to a difference of two logits.

    Attributes:
        embeddings: Contribution of the input of the first layer, (batch,).
        heads: Contribution of each head, (layers, batch, heads).
        attention_bias: Contribution of the bias of each output projection, (layers, batch).
        feed_forward: Contribution of each feed-forward network, (layers, batch).
        constant: Contribution of the biases of the final norm and of the logits, (batch,).
    """

    embeddings: Array
    heads: Array
    attention_bias: Array
    feed_forward: Array
    constant: Array


def direct_logit_attribution(model: LanguageModel, tokens: Any, targets: Any, others: Any = None) -> LogitAttribution:
    """Split the logit of a token after the last position into the direct contributions of all heads and layers.

    The residual stream is the sum of the outputs of all parts. With a fixed scale, the final norm is linear, so a logit
    is a sum, too (Elhage et al., 2021, "A Mathematical Framework for Transformer Circuits"; Wang et al.,
    2022, section 3.1).

    Args:
        model: Language model with pre-norm layers.
        tokens: Ids (batch, length).
        targets: For each row, the token whose logit is split, or one integer for all rows.
        others: The same for tokens whose logits are subtracted. Default: none.

    Returns:
        The parts; they add up to the logit, or to the difference.

    Raises:
        ConfigError: If the model has another class, or its logits are not a sum of parts.
        DataError: If the number of targets differs from the number of rows, or an id is out of range.
    """
    check_model(model, LanguageModel)
    model = model.unpack()  # packed weights have no derivative
    norm, config, last = model.norm, model.config, len(model.layers) - 1
    if config.norm_position != "pre" or config.logits_softcap is not None or type(norm) not in (LayerNorm, RMSNorm):
        raise ConfigError(
            f"the logits are no sum of parts (norm {config.norm!r}, norm_position {config.norm_position!r}, "
            f"logits_softcap {config.logits_softcap}); expected 'layer' or 'rms', 'pre' and None"
        )
    names = ["layers.0.residual_in", "*.heads", "layers.*.feed_forward.output", f"layers.{last}.residual_out"]
    with record(model, names) as activations:
        model(tokens)
    x = {name: array[..., -1, :] for name, array in activations.items()}  # at the last position
    final = x[f"layers.{last}.residual_out"]
    xp, zeros = array_namespace(final), array_namespace(final).zeros_like(final)
    chosen = _one_hot(targets, "targets", model.vocab_size, final)
    if others is not None:
        chosen = chosen - _one_hot(others, "others", model.vocab_size, final)

    def logits(residual: Array) -> Array:
        return model.readout(residual, norm=_with_scale_of(norm, final))

    _, pull = vjp(logits, final)
    (direction,) = pull(chosen)  # in which a vector in the residual stream raises the logit

    def part(vector: Array) -> Array:
        return xp.sum(direction * vector, axis=-1)

    heads, bias, feed_forward = [], [], []
    for i, layer in enumerate(model.layers):
        first, second = _residuals(layer)

        def written(z: Array, layer: Any = layer, residual: Any = first) -> Array:
            """Return what heads (batch, heads, head_dim) write into the residual stream."""
            return residual.add(zeros, layer.self_attention.output(merge_heads(z[:, :, None, :]))[:, 0, :])

        z = x[f"layers.{i}.self_attention.heads"]
        _, pull = vjp(written, z)
        heads.append(xp.sum(pull(direction)[0] * z, axis=-1))
        bias.append(part(written(xp.zeros_like(z))))
        feed_forward.append(part(second.add(zeros, x[f"layers.{i}.feed_forward.output"])))
    embeddings, constant = part(x["layers.0.residual_in"]), xp.sum(chosen * logits(zeros), axis=-1)
    return LogitAttribution(embeddings, xp.stack(heads), xp.stack(bias), xp.stack(feed_forward), constant)


def logit_difference(targets: Any, others: Any) -> Callable[[Array], Array]:
    """Return a metric: the mean over rows of a target's logit minus another token's, after the last position.

    Args:
        targets: Tokens whose logits count positively, one for each row, or one integer for all rows.
        others: The same for tokens whose logits count negatively.

    Returns:
        Function of logits (batch, length, vocab_size) that returns a scalar array. It raises DataError if there
        are no rows, the number of tokens differs from the number of rows, or an id is out of range.
    """

    def metric(logits: Array) -> Array:
        if not logits.shape[0]:
            raise DataError(f"the logits have shape {tuple(logits.shape)}; expected at least one row")
        last, vocab_size = logits[:, -1, :], logits.shape[-1]
        signs = _one_hot(targets, "targets", vocab_size, last) - _one_hot(others, "others", vocab_size, last)
        return array_namespace(last).sum(last * signs) / last.shape[0]

    return metric


def _with_scale_of(norm: Any, final: Array) -> Callable[[Array], Array]:
    """Return a norm as an affine map: with the scale that it has for `final`."""
    xp, is_layer_norm = array_namespace(final), type(norm) is LayerNorm

    def centered(x: Array) -> Array:
        return x - array_namespace(x).mean(x, axis=-1, keepdims=True) if is_layer_norm else x

    variance = xp.mean(centered(final) ** 2, axis=-1, keepdims=True)
    scale = norm.weight / xp.sqrt(variance + norm.epsilon)
    shift = norm.bias if is_layer_norm and norm.bias is not None else 0.0
    return lambda x: centered(x) * scale + shift


def _residuals(layer: Any) -> tuple[Any, Any]:
    """Return the residual connections of attention and feed-forward network."""
    if hasattr(layer, "residual"):
        return layer.residual, layer.residual
    return layer.self_attention_residual, layer.feed_forward_residual


def _one_hot(tokens: Any, name: str, vocab_size: int, like: Array) -> Array:
    """Return rows (batch, vocab_size) of tokens, one for each row of `like` or one integer for all."""
    xp, num_rows = array_namespace(like), like.shape[0]
    host = to_host(tokens) if is_array(tokens) else tokens
    is_single = isinstance(host, Integral) or getattr(host, "shape", None) == ()
    ids = check_tokens(name, [host] * num_rows if is_single else host, vocab_size)
    if len(ids) != num_rows:
        raise DataError(f"{name} has {len(ids)} tokens for {num_rows} rows; expected one each, or an integer for all")
    rows = np.asarray(ids, dtype=np.int64).reshape(-1, 1) == np.arange(vocab_size)
    return xp.astype(xp.from_host(rows, device=device(like)), like.dtype)
