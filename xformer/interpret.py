"""Analyses of models: plain functions of a model and tokens, on every array library.

Each records activations (`xformer.record`), changes them (`xformer.intervene`) or differentiates with respect to them.
The code is short, so that you can copy and change it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from numbers import Integral
from operator import add
from typing import Any, NamedTuple

import numpy as np

from xformer.backends import Array, array_namespace, device, is_floating, to_host
from xformer.config import check_count, check_number
from xformer.errors import ConfigError, DataError, ShapeError, check_choice, describe_type
from xformer.layers import LayerNorm, RMSNorm
from xformer.models import Encoder, LanguageModel
from xformer.models.token_ids import as_token_ids, check_tokens, ids_of
from xformer.ops.linear import merge_heads
from xformer.tracing import grad, vjp
from xformer.tracing.activations import activation_names, intervene, record
from xformer.tree import is_array

__all__ = [
    "LogitAttribution", "activation_patching", "attention_entropy", "attention_rollout", "attribution_patching",
    "direct_logit_attribution", "duplicate_token_scores", "feed_forward_ablation", "head_ablation", "induction_scores",
    "logit_difference", "logit_lens", "previous_token_scores",
]  # fmt: skip


def __dir__() -> list[str]:
    return list(__all__)


Model = LanguageModel | Encoder  # one stack of layers


# --- Checks that the analyses share -----------------------------------------------------------------------------------


def check_model(model: Any, *classes: type) -> None:
    """Raise ConfigError if a model has another class or no layers."""
    expected = " or ".join(each.__name__ for each in classes)
    if not isinstance(model, classes):
        raise ConfigError(f"model is {describe_type(model)}; expected {expected}")
    if not model.layers:  # type: ignore[attr-defined]
        raise ConfigError(f"the model has no layers; expected {expected} with at least one")


# --- Analyses of attention weights ------------------------------------------------------------------------------------


def attention_rollout(model: Model, tokens: Any, *, residual: float = 0.5) -> Array:
    """Compute how much each position receives from each input token, through the attention of all layers.

    A layer mixes positions by its attention weights, averaged over heads, and the residual connection keeps a share of
    each position. The rollout is the product of these matrices over all layers (Abnar and Zuidema, 2020, "Quantifying
    Attention Flow in Transformers", section 3).

    Args:
        model: Language model or encoder.
        tokens: Ids (batch, length).
        residual: Share of the residual stream, 0 to 1.

    Returns:
        Array (batch, length, length) whose rows sum to one.

    Raises:
        ConfigError: If `residual` is out of range, or the model has another class.
    """
    check_number("residual", residual, at_least=0, at_most=1)
    weights = _weights(model, tokens)
    xp, length = array_namespace(weights), weights.shape[-1]
    identity = xp.eye(length, dtype=weights.dtype, device=device(weights))
    rollout = xp.broadcast_to(identity, (weights.shape[1], length, length))
    for layer in range(weights.shape[0]):
        rollout = xp.matmul(residual * identity + (1.0 - residual) * xp.mean(weights[layer, ...], axis=1), rollout)
    return rollout


def attention_entropy(model: Model, tokens: Any) -> Array:
    """Compute the entropy of the attention weights of each head and query, in nats.

    It is 0 if a query attends to one key, and log(n) if it attends to n keys equally (Ghader and Monz, 2017, "What does
    Attention in Neural Machine Translation Pay Attention to?", section 5).

    Args:
        model: Language model or encoder.
        tokens: Ids (batch, length).

    Returns:
        Array (layers, batch, heads, length).

    Raises:
        ConfigError: If the model has another class.
    """
    weights = _weights(model, tokens)
    xp = array_namespace(weights)
    positive = xp.where(weights > 0, weights, xp.ones_like(weights))  # 0 log 0 is 0
    return -xp.sum(weights * xp.log(positive), axis=-1)


def previous_token_scores(model: Model, tokens: Any) -> Array:
    """Compute the mean attention of each head to the token before the query (Elhage et al., 2021).

    Args:
        model: Language model or encoder.
        tokens: Ids (batch, length), length at least 2.

    Returns:
        Array (layers, heads) of numbers from 0 to 1.

    Raises:
        ShapeError: If no query has a token before it.
        ConfigError: If the model has another class.
    """
    ids = _host_ids(model, tokens)
    length = ids.shape[1]
    return _mean_attention(model, ids, np.broadcast_to(np.eye(length, k=-1, dtype=bool), (len(ids), length, length)))


def duplicate_token_scores(model: Model, tokens: Any) -> Array:
    """Compute the mean attention of each head to earlier occurrences of the query's token (Wang et al., 2022).

    The mean is over queries whose token has occurred before. See "Interpretability in the Wild", section 3.

    Args:
        model: Language model or encoder.
        tokens: Ids (batch, length).

    Returns:
        Array (layers, heads) of numbers from 0 to 1.

    Raises:
        ShapeError: If no token occurs twice.
        ConfigError: If the model has another class.
    """
    ids = _host_ids(model, tokens)
    return _mean_attention(model, ids, _earlier_occurrences(ids))


def induction_scores(
    model: LanguageModel, tokens: Any = None, *, length: int = 50, batch_size: int = 4, seed: int = 0
) -> Array:
    """Compute the mean attention of each head to the token after an earlier occurrence of the query's token.

    An induction head continues `A B ... A` with `B`. On repeated random tokens nothing else explains such attention
    (Olsson et al., 2022, "In-context Learning and Induction Heads"). The mean is over queries whose token has occurred
    before.

    Args:
        model: Language model.
        tokens: Ids (batch, length). Default: random ids, repeated once, after bos_id if the model has one.
        length: Number of random ids.
        batch_size: Number of rows of random ids.
        seed: Seed of the random ids.

    Returns:
        Array (layers, heads) of numbers from 0 to 1.

    Raises:
        ShapeError: If no token occurs twice.
        ConfigError: If the model has another class.
    """
    if tokens is None:
        tokens = _repeated_tokens(model, length, batch_size, seed)
    ids = _host_ids(model, tokens)
    after = np.zeros((*ids.shape, ids.shape[1]), dtype=bool)
    after[:, :, 1:] = _earlier_occurrences(ids)[:, :, :-1]
    return _mean_attention(model, ids, after)


def _weights(model: Model, tokens: Any) -> Array:
    """Return the attention weights of a call, (layers, batch, heads, queries, keys)."""
    check_model(model, LanguageModel, Encoder)
    with record(model, "layers.*.self_attention.weights") as activations:
        model(tokens)
    arrays = list(activations.values())
    return array_namespace(*arrays).stack(arrays)


def _mean_attention(model: Model, ids: Any, keys: Any) -> Array:
    """Return the mean attention to some keys, (layers, heads), of the queries that have one.

    `keys` is a boolean NumPy array (batch, queries, keys).
    """
    count = int(keys.any(axis=-1).sum())
    if not count:
        raise ShapeError(f"tokens of shape {ids.shape} have no such pair of positions; expected at least one")
    weights = _weights(model, ids)
    xp = array_namespace(weights)
    selected = xp.astype(xp.from_host(keys, device=device(weights)), weights.dtype)
    return xp.sum(weights * selected[None, :, None, :, :], axis=(1, 3, 4)) / count


def _earlier_occurrences(ids: Any) -> Any:
    """Return where a key is an earlier occurrence of the token of the query, (batch, queries, keys)."""
    return (ids[:, :, None] == ids[:, None, :]) & np.tri(ids.shape[1], k=-1, dtype=bool)


def _host_ids(model: Any, tokens: Any) -> Any:
    """Return token ids as a NumPy array (batch, length)."""
    check_model(model, LanguageModel, Encoder)
    _, parameter = next(model.named_arrays())
    return to_host(ids_of(as_token_ids(tokens, "token", model.vocab_size, parameter)))


def _repeated_tokens(model: LanguageModel, length: int, batch_size: int, seed: int) -> Any:
    check_model(model, LanguageModel)
    check_count("length", length)
    check_count("batch_size", batch_size)
    check_count("seed", seed, 0)
    config = model.config
    special = (config.pad_id, config.bos_id, config.eos_id)
    usual = [token for token in range(config.vocab_size) if token not in special]
    random = np.random.default_rng(seed).choice(usual, (batch_size, length))
    first = [] if config.bos_id is None else [np.full((batch_size, 1), config.bos_id)]
    return np.concatenate([*first, random, random], axis=1)


# --- Analyses of where logits come from -------------------------------------------------------------------------------


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


# --- Analyses that change activations and compute the change of a metric ----------------------------------------------

Metric = Callable[[Array], Array]

# Activations with one slice along axis 1 for each head or position.
_PARTS = {"heads": "self_attention.heads", "residual": "residual_in", "feed_forward": "feed_forward.output"}


def head_ablation(model: Model, tokens: Any, metric: Metric, *, value: str = "zero") -> Array:
    """Compute how a metric changes when the output of a head is replaced by zeros or by its mean.

    See Michel et al. (2019), "Are Sixteen Heads Really Better than One?".

    Args:
        model: Language model or encoder.
        tokens: Ids (batch, length).
        metric: Function of the output of the model that returns a scalar array, e.g. `logit_difference(...)`.
        value: "zero", or "mean" for the mean over all positions and rows.

    Returns:
        Array (layers, heads): the metric without the head minus the metric of the model.

    Raises:
        ConfigError: If `value` is unknown, the model has another class, or the metric returns no scalar array.
    """
    names, ablated = _names(model, "heads"), partial(_ablated, value, (0, 2))
    patches = [replaced(head, ablated) for head in range(model.config.num_heads)]
    return _effects(model, tokens, metric, dict.fromkeys(names, patches))


def feed_forward_ablation(model: Model, tokens: Any, metric: Metric, *, value: str = "zero") -> Array:
    """Compute how a metric changes when the output of a feed-forward network is replaced by zeros or by its mean.

    See Wang et al. (2022), section 2, on the choice between zeros and the mean. Arguments and errors are those of
    `head_ablation`.

    Returns:
        Array (layers,): the metric without the network minus the metric of the model.
    """
    patches = [partial(_ablated, value, (0, 1))]
    return _effects(model, tokens, metric, dict.fromkeys(_names(model, "feed_forward"), patches))[:, 0]


def activation_patching(model: Model, tokens: Any, source: Any, metric: Metric, *, part: str = "residual") -> Array:
    """Compute how a metric changes when an activation is replaced by that of another input.

    Typically `source` is a prompt that the model answers well, and `tokens` a corrupted one: the patches that restore
    the answer show where the model keeps the information (Meng et al., 2022, section 2; Zhang and Nanda, 2024).

    Args:
        model: Language model or encoder.
        tokens: Ids (batch, length) of the input whose activations are replaced.
        source: Ids of the input that provides the new activations, of the same shape.
        metric: Function of the output of the model that returns a scalar array, e.g. `logit_difference(...)`.
        part: "residual", the input of a layer at one position; "feed_forward", the output of the network at one
            position; or "heads", the output of one head at all positions.

    Returns:
        Array (layers, length), or (layers, heads): the metric with the patch minus the metric of `tokens`.

    Raises:
        ConfigError: If `part` is unknown, the model has another class, or the metric returns no scalar array.
        ShapeError: If `tokens` and `source` differ in shape.
    """
    patches = {
        name: [replaced(i, partial(_same_shape, value)) for i in range(value.shape[1])]
        for name, value in _recorded(model, source, part).items()
    }
    return _effects(model, tokens, metric, patches)


def attribution_patching(model: Model, tokens: Any, source: Any, metric: Metric, *, part: str = "residual") -> Array:
    """Estimate the results of `activation_patching` for all patches at once, from the gradient of the metric.

    The estimate is the first-order change, (value of `source` - value of `tokens`) * gradient (Nanda, 2023,
    "Attribution Patching"; Syed et al., 2023). Arguments, result and errors are those of `activation_patching`.
    """
    values, own = _recorded(model, source, part), _recorded(model, tokens, part)
    differentiable = model.unpack()  # packed weights have no derivative

    def shifted(shifts: dict[str, Array]) -> Array:
        with intervene(differentiable, {name: partial(add, shift) for name, shift in shifts.items()}):
            return _scalar(metric, differentiable(tokens))

    changes = {name: _same_shape(value, own[name]) - own[name] for name, value in values.items()}
    gradients = grad(shifted)({name: array_namespace(x).zeros_like(x) for name, x in changes.items()})
    xp = array_namespace(*values.values())
    effects = [change * gradients[name] for name, change in changes.items()]
    axes = tuple(axis for axis in range(effects[0].ndim) if axis != 1)
    return xp.stack([xp.sum(effect, axis=axes) for effect in effects])


def _names(model: Model, part: str) -> list[str]:
    """Return the names of the activations of a part in all layers."""
    check_model(model, LanguageModel, Encoder)
    check_choice("part", part, _PARTS)
    return [name for name in activation_names(model) if fnmatchcase(name, f"layers.*.{_PARTS[part]}")]


def _recorded(model: Model, tokens: Any, part: str) -> dict[str, Array]:
    with record(model, _names(model, part)) as activations:
        model(tokens)
    return dict(activations)


def replaced(index: int, function: Callable[[Array], Array]) -> Callable[[Array], Array]:
    """Return an intervention that replaces slice `index` along axis 1 by that of `function(x)`."""

    def intervention(x: Array) -> Array:
        xp = array_namespace(x)
        indices = xp.arange(x.shape[1], device=device(x))
        return xp.where(xp.reshape(indices == index, (1, -1, *(1 for _ in x.shape[2:]))), function(x), x)

    return intervention


def _ablated(value: str, axes: tuple[int, ...], x: Array) -> Array:
    xp = array_namespace(x)
    if value not in ("zero", "mean"):
        raise ConfigError(f"value is {value!r}; expected 'zero' or 'mean'")
    return xp.zeros_like(x) if value == "zero" else xp.broadcast_to(xp.mean(x, axis=axes, keepdims=True), x.shape)


def _same_shape(value: Array, x: Array) -> Array:
    if tuple(x.shape) != tuple(value.shape):
        received, expected = tuple(value.shape), tuple(x.shape)
        raise ShapeError(f"source has activations of shape {received}, tokens of shape {expected}; expected the same")
    return value


def _effects(model: Model, tokens: Any, metric: Metric, patches: Mapping[str, Sequence[Callable[..., Array]]]) -> Array:
    """Return by how much each patch of each activation changes the metric, (activations, patches)."""

    def evaluate(interventions: dict[str, Any]) -> Array:
        with intervene(model, interventions):
            return _scalar(metric, model(tokens))

    clean = _scalar(metric, model(tokens))
    rows = [[evaluate({name: patch}) - clean for patch in of_name] for name, of_name in patches.items()]
    xp = array_namespace(clean)
    return xp.stack([xp.stack(row) for row in rows])


def _scalar(metric: Metric, output: Array) -> Array:
    if not callable(metric):
        raise ConfigError(f"metric is {describe_type(metric)}; expected a function, e.g. logit_difference(...)")
    value = metric(output)
    if not is_array(value) or tuple(value.shape) != () or not is_floating(value.dtype):
        received = f"an array of shape {tuple(value.shape)}" if is_array(value) else describe_type(value)
        raise ConfigError(f"the metric returned {received}; expected a floating scalar array, e.g. of xp.mean")
    return value
