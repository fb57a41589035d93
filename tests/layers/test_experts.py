"""Mixtures of experts, and the loss that balances their use."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import xformer as xf
from tests.conftest import assert_close
from tests.reference import few_on_jax, for_each, normal, raises_line, without_jax
from xformer.backends import array_namespace, from_host
from xformer.errors import BackendError, ConfigError, ShapeError
from xformer.layers import FeedForward, GatedFeedForward, Initializer, MixtureOfExperts, record_routing
from xformer.random import Rng
from xformer.tree import flatten

RNG = Rng(3)


def mixture(xp="numpy", cls=GatedFeedForward, dtype="float64", count=4, dropout=0.0, **options):
    init = Initializer(xp, seed=1, dtype=dtype)
    experts = [cls(6, 8, dropout=dropout, init=init) for _ in range(count)]
    shared = cls(6, 5, dropout=dropout, init=init) if options.pop("shared", False) else None
    return MixtureOfExperts(experts, init=init, shared=shared, **options)


def by_token(layer, x):
    """Return the output as the papers define it."""
    outputs = []
    for row in x.reshape(-1, x.shape[-1]):
        scores = row @ layer.router + (0.0 if layer.router_bias is None else layer.router_bias)
        probabilities = np.exp(scores) / np.exp(scores).sum()
        chosen = np.argsort(-probabilities)[: layer.num_experts_per_token]
        weights = probabilities[chosen] / (probabilities[chosen].sum() if layer.normalize else 1.0)
        outputs.append(sum(weight * layer.experts[e](row[None])[0] for weight, e in zip(weights, chosen, strict=True)))
        if layer.shared is not None:
            outputs[-1] += layer.shared(row[None])[0] / (1.0 + np.exp(-row @ layer.shared_gate))
    return np.stack(outputs).reshape(x.shape)


OPTIONS = [
    {"shared": True},
    {"normalize": False, "bias": True},
    {"num_experts_per_token": 1},
    {"num_experts_per_token": 4},
]


@few_on_jax(
    "cls,options", itertools.product([FeedForward, GatedFeedForward], OPTIONS), [(GatedFeedForward, OPTIONS[0])]
)
def test_the_output_is_the_weighted_sum_of_the_chosen_experts(xp, cls, options):
    x = normal(0, 2, 5, 6)
    assert_close(mixture(xp, cls, **options)(from_host(xp, x)), by_token(mixture(cls=cls, **options), x), xp=xp)


@for_each("dtype", ["float32", "float16", "bfloat16"])
def test_dtypes(dtype):
    pytest.importorskip("ml_dtypes")
    x, wide = normal(0, 3, 6), mixture()
    layer = wide.to(dtype=dtype)
    actual = layer(x)
    assert_close(actual.astype(np.float64), layer.to(dtype="float64")(x), tolerance={"float32": 1e-5}.get(dtype, 0.05))
    assert actual.dtype == layer.router.dtype


@for_each("shape", [(6,), (0, 6), (2, 0, 6), (2, 3, 4, 6)])
def test_shapes(shape):
    x = normal(0, *shape)
    assert mixture()(x).shape == shape
    if x.size:
        assert_close(mixture()(x), mixture()(x.reshape(-1, 6)).reshape(shape))


@without_jax  # which draws its own numbers
def test_dropout_is_the_same_on_every_library(xp):
    x = normal(0, 2, 5, 6)
    layers = [mixture(each, dropout=0.5) for each in ("numpy", xp)]
    expected = layers[0](x, RNG)
    assert not np.allclose(expected, layers[0](x))
    assert_close(layers[1](from_host(xp, x), RNG), expected, xp=xp)


def test_gradients_equal_those_of_torch():
    torch = pytest.importorskip("torch", reason="it is what they are compared with")

    def total(layer, x):
        y = layer(x)
        return array_namespace(y).sum(y * y * y)

    x, layer = normal(0, 7, 6), mixture(bias=True, shared=True)
    actual = flatten(xf.grad(total, argnums=(0, 1))(layer, x))[0]
    leaves, rebuild = flatten((layer.to("torch"), torch.asarray(x)))
    leaves = [leaf.requires_grad_() for leaf in leaves]
    expected = torch.autograd.grad(total(*rebuild(leaves)), leaves)
    by_func = torch.func.grad(lambda x: total(layer.to("torch"), x))(torch.asarray(x))
    np.testing.assert_allclose(by_func, expected[-1], rtol=0, atol=1e-11)
    for ours, theirs in zip(actual, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-11)


@few_on_jax("loss", [(False,), (True,)], [(True,)])
def test_derivatives_on_every_library(xp, loss):
    def total(layer, x):
        with record_routing() as routing:
            y = layer(x)
        y = array_namespace(y).sum(y * y)
        return y + 3.0 * xf.load_balancing_loss(routing) if loss else y

    x = normal(0, 7, 6)
    expected = xf.grad(total)(mixture(), x)
    actual = xf.grad(total)(mixture(xp), from_host(xp, x))
    for (name, array), (_, other) in zip(actual.named_arrays(), expected.named_arrays(), strict=True):
        assert_close(array, other, xp=xp), name


def test_programs_and_layers_for_inference_have_the_bits_of_the_layer():
    x = normal(0, 2, 5, 6).astype("float32")
    layer = mixture(dtype="float32")
    for each in (layer, xf.layers.quantize(layer), xf.layers.pack(layer), xf.layers.pack(xf.layers.quantize(layer))):
        program = xf.jit(each)
        for start in range(3):
            np.testing.assert_array_equal(program(x[:, start:]), each(x[:, start:]))
        assert_close(each(x), layer(x), tolerance=0.02)
        assert each.router is layer.router


def test_adapters_of_experts_are_trained():
    x, layer = normal(0, 5, 6), mixture()
    adapted = xf.lora(layer, rank=2)
    assert_close(adapted(x), layer(x))
    gradient = dict(xf.grad(lambda layer: array_namespace(layer(x)).sum(layer(x) ** 2))(adapted).named_arrays())
    assert len(gradient) == 2 * 3 * 4
    assert all(np.any(array) for name, array in gradient.items() if name.endswith("lora_b"))


@for_each("masked", [False, True])
def test_the_loss_is_that_of_transformers(masked):
    torch = pytest.importorskip("torch", reason="transformers needs it")
    mixtral = pytest.importorskip("transformers.models.mixtral.modeling_mixtral")
    layers = [mixture(), mixture(num_experts_per_token=2, bias=True)]
    with record_routing() as routing:
        for layer in layers:
            layer(normal(0, 2, 4, 6))
    mask = np.asarray([[True, True, True, False], [True, False, False, False]]) if masked else None
    theirs = tuple(torch.log(torch.asarray(each.probabilities)) for each in routing)
    expected = mixtral.load_balancing_loss_func(theirs, 4, 2, torch.asarray(mask) if masked else None)
    assert float(xf.load_balancing_loss(routing, mask)) == pytest.approx(float(expected), rel=1e-6)
    on_torch = [each._replace(probabilities=torch.asarray(each.probabilities)) for each in routing]
    on_torch = [each._replace(experts=torch.asarray(each.experts)) for each in on_torch]
    for own in (mask, None if mask is None else mask.tolist()):
        assert float(xf.load_balancing_loss(on_torch, own)) == pytest.approx(float(expected), rel=1e-6)


def test_the_loss_is_zero_if_no_token_counts():
    with record_routing() as routing:
        mixture()(normal(0, 2, 4, 6))
    assert float(xf.load_balancing_loss(routing, np.zeros((2, 4), bool))) == 0.0
    with record_routing() as routing:
        mixture()(normal(0, 0, 6))
    assert float(xf.load_balancing_loss(routing)) == 0.0


def test_wrong_calls():
    def layers(*sizes, **options):
        return [FeedForward(6, size, init=0, **options) for size in sizes]

    with raises_line(ConfigError, r"experts is \[\]; expected a list of FeedForward"):
        MixtureOfExperts([], init=0)
    with raises_line(ConfigError, r"experts is 8; expected a list of FeedForward"):
        MixtureOfExperts(8, init=0)
    with raises_line(ConfigError, "the experts differ: FeedForward.* and FeedForward.*; expected the same"):
        MixtureOfExperts(layers(8, 9), init=0)
    with raises_line(ConfigError, "the experts differ"):
        MixtureOfExperts([*layers(8), *layers(8, activation="gelu")], init=0)
    with raises_line(ConfigError, "num_experts_per_token is 3; expected at most the number of experts, 2"):
        MixtureOfExperts(layers(8, 8), num_experts_per_token=3, init=0)
    with raises_line(ConfigError, "num_experts_per_token is 0; expected an integer of at least 1"):
        MixtureOfExperts(layers(8, 8), num_experts_per_token=0, init=0)
    with raises_line(ConfigError, "init is missing"):
        MixtureOfExperts(layers(8, 8))
    with raises_line(ShapeError, r"linear got x of shape \(5, 7\)"):
        mixture()(normal(0, 5, 7))
    with raises_line(BackendError, "got a builtins.list; expected an array of"):
        mixture()([[1.0] * 6])
    with raises_line(ConfigError, "routing: nothing was recorded; expected calls of MixtureOfExperts"):
        xf.load_balancing_loss([])
    with raises_line(ConfigError, r"routing is array.*; expected the list of record_routing\(\)"):
        xf.load_balancing_loss(np.ones((3, 4)))
    with record_routing() as routing:
        mixture()(normal(0, 5, 6))
    with raises_line(
        ShapeError, r"mask has shape \(5,\) and dtype int64; expected bool, True = the token counts, for 5 tokens"
    ):
        xf.load_balancing_loss(routing, np.ones(5, int))
    with raises_line(ShapeError, r"mask has shape \(4,\) and dtype bool; expected bool, True"):
        xf.load_balancing_loss(routing, np.ones(4, bool))
    with record_routing() as routing:
        mixture()(normal(0, 5, 6))
        mixture(count=3)(normal(0, 5, 6))
    with raises_line(ConfigError, "routing: layers with 3 and 4 experts; expected calls"):
        xf.load_balancing_loss(routing)
