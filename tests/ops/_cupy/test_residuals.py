"""Sums and norms of layers in one kernel: the same bits as of both kernels, and the derivatives of the definitions."""

from __future__ import annotations

import numpy as np
import pytest

import xformer as xf
from tests.conftest import assert_close
from tests.ops.replace_kernels import replace_kernels
from tests.reference import for_each
from xformer import ops
from xformer.backends import array_namespace
from xformer.tracing.activations import record
from xformer.tree import flatten

SIZES = {"d_model": 16, "num_heads": 2, "d_ff": 24, "norm_position": "pre"}
# Options of a language model of three layers, and how many of its sums are computed with the norm that follows.
MODELS = [
    ({}, 6),
    ({"norm": "rms", "residual_scale": 0.5}, 6),
    ({"norm_position": "post"}, 6),
    ({"norm_position": "output", "norm": "rms"}, 1),
    ({"norm_position": "sandwich"}, 6),
    ({"parallel_residual": True}, 3),
    ({"parallel_residual": True, "shared_norm": True, "norm": "rms"}, 3),
    ({"norm": "max_scaled"}, 0),
    ({"rematerialize": True}, 3),
]
IDS = np.asarray([[5, 4, 7, 1], [3, 3, 9, 2]])


def loss_and_gradients(model, *inputs):
    def loss(model):
        losses = xf.cross_entropy(model(*inputs), IDS)
        return array_namespace(losses).sum(losses)

    value, gradient = xf.value_and_grad(loss)(model)
    return [value, *flatten(gradient)[0]]


@pytest.mark.parametrize(("options", "count"), MODELS, ids=str)
def test_language_models(cuda_host, monkeypatch, options, count):
    model = xf.LanguageModel(xf.LanguageModelConfig(vocab_size=13, num_layers=3, **SIZES | options), seed=1)
    lines = ops.explain(lambda: model(IDS)).splitlines()
    calls = [line for line in lines if line.startswith("add_norm on numpy: cupy.add_norm")]
    assert [line.partition("(")[2] for line in calls] == ([f"{count} calls)"] if count > 1 else [""] * count)
    logits = model(IDS)
    with record(model, "layers.*.residual_out") as recorded:  # which takes the sums apart
        np.testing.assert_array_equal(model(IDS), logits)
    assert np.asarray(recorded["layers.1.residual_out"]).shape == (2, 4, 16)

    got = loss_and_gradients(model, IDS)
    replace_kernels(monkeypatch, "numpy", {})
    for actual, expected in zip(got, loss_and_gradients(model, IDS), strict=True):
        assert_close(actual, expected, tolerance=1e-4)


@for_each("norm_position", ["pre", "post"])
def test_translation_and_steps(cuda_host, monkeypatch, norm_position):
    sizes = SIZES | {"norm_position": norm_position, "num_encoder_layers": 2, "num_decoder_layers": 2}
    model = xf.Transformer(xf.TransformerConfig(source_vocab_size=13, target_vocab_size=13, **sizes), seed=1)
    got = [*loss_and_gradients(model, IDS, IDS), model.decode_step(IDS, model.prefill(IDS))]
    replace_kernels(monkeypatch, "numpy", {})
    reference = [*loss_and_gradients(model, IDS, IDS), model.decode_step(IDS, model.prefill(IDS))]
    for actual, expected in zip(got, reference, strict=True):
        assert_close(actual, expected, tolerance=1e-4)


def test_a_layer_alone_returns_an_array(cuda_host):
    config = xf.LanguageModelConfig(vocab_size=13, num_layers=1, **SIZES)
    layer = xf.LanguageModel(config, seed=1).layers[0]
    x = np.random.default_rng(0).standard_normal((2, 4, 16), dtype="float32")
    assert type(layer(x)) is np.ndarray
    assert "add_norm on numpy: cupy.add_norm" in ops.explain(lambda: layer(x))
