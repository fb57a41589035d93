"""Analyses that change activations and compute the change of a metric."""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatchcase
from functools import partial
from operator import add
from typing import Any

from xformer.backends import Array, array_namespace, device, is_floating
from xformer.errors import ConfigError, ShapeError, check_choice, describe_type
from xformer.interpret.checks import check_model
from xformer.models import Encoder, LanguageModel
from xformer.tracing import grad
from xformer.tracing.activations import activation_names, intervene, record
from xformer.tree import is_array

Metric = Callable[[Array], Array]

# Activations with one slice along axis 1 for each head or position.
_PARTS = {"heads": "self_attention.heads", "residual": "residual_in", "feed_forward": "feed_forward.output"}


def head_ablation(model: LanguageModel | Encoder, tokens: Any, metric: Metric, *, value: str = "zero") -> Array:
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
    clean = _evaluate(model, tokens, metric)
    rows = []
    for name in names:
        patches = [replaced(head, ablated) for head in range(model.config.num_heads)]
        effects = [_evaluate(model, tokens, metric, {name: patch}) - clean for patch in patches]
        rows.append(array_namespace(clean).stack(effects))
    return array_namespace(clean).stack(rows)


def feed_forward_ablation(model: LanguageModel | Encoder, tokens: Any, metric: Metric, *, value: str = "zero") -> Array:
    """Compute how a metric changes when the output of a feed-forward network is replaced by zeros or by its mean.

    See Wang et al. (2022), section 2, on the choice between zeros and the mean. Arguments and errors are those of
    `head_ablation`.

    Returns:
        Array (layers,): the metric without the network minus the metric of the model.
    """
    names, ablated = _names(model, "feed_forward"), partial(_ablated, value, (0, 1))
    clean = _evaluate(model, tokens, metric)
    effects = [_evaluate(model, tokens, metric, {name: ablated}) for name in names]
    return array_namespace(clean).stack(effects) - clean


def activation_patching(
    model: LanguageModel | Encoder, tokens: Any, source: Any, metric: Metric, *, part: str = "residual"
) -> Array:
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
    values = _recorded(model, source, part)
    before = _evaluate(model, tokens, metric)
    rows = []
    for name, value in values.items():
        patches = [replaced(i, partial(_same_shape, value)) for i in range(value.shape[1])]
        effects = [_evaluate(model, tokens, metric, {name: patch}) - before for patch in patches]
        rows.append(array_namespace(before).stack(effects))
    return array_namespace(before).stack(rows)


def attribution_patching(
    model: LanguageModel | Encoder, tokens: Any, source: Any, metric: Metric, *, part: str = "residual"
) -> Array:
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


def _names(model: LanguageModel | Encoder, part: str) -> list[str]:
    """Return the names of the activations of a part in all layers."""
    check_model(model, LanguageModel, Encoder)
    check_choice("part", part, _PARTS)
    return [name for name in activation_names(model) if fnmatchcase(name, f"layers.*.{_PARTS[part]}")]


def _recorded(model: LanguageModel | Encoder, tokens: Any, part: str) -> dict[str, Array]:
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


def _evaluate(
    model: LanguageModel | Encoder, tokens: Any, metric: Metric, interventions: dict[str, Any] | None = None
) -> Array:
    if interventions is None:
        return _scalar(metric, model(tokens))
    with intervene(model, interventions):
        return _scalar(metric, model(tokens))


def _scalar(metric: Metric, output: Array) -> Array:
    if not callable(metric):
        raise ConfigError(f"metric is {describe_type(metric)}; expected a function, e.g. logit_difference(...)")
    value = metric(output)
    if not is_array(value) or tuple(value.shape) != () or not is_floating(value.dtype):
        received = f"an array of shape {tuple(value.shape)}" if is_array(value) else describe_type(value)
        raise ConfigError(f"the metric returned {received}; expected a floating scalar array, e.g. of xp.mean")
    return value
