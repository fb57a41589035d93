"""Packed models: the same outputs, tokens and files as the original ones, and the refusal to train."""

from __future__ import annotations

import numpy as np
import pytest

import xformer as xf
from tests.models.test_quantized import IDS, MODELS, SIZES, outputs
from tests.reference import few_on_jax, for_each, raises_line
from xformer import fit, generate, native
from xformer.backends import to_host
from xformer.errors import ConfigError
from xformer.families import save_pretrained
from xformer.layers.weights import is_packed

if not native.is_available():
    pytest.skip(native.WHY_NOT, allow_module_level=True)


@for_each("quantized", [None, "int8"])
@for_each("name", MODELS)
def test_outputs_are_those_of_the_original_model(name, quantized):
    original = MODELS[name]() if quantized is None else MODELS[name]().quantize(quantized)
    model = original.pack()
    assert is_packed(model)
    assert model.pack().parameter_count() == original.parameter_count()
    atol = 1e-5 if quantized is None else 0.06  # maps with int8 weights round their inputs, too
    np.testing.assert_allclose(outputs(model), outputs(original), rtol=0.0, atol=atol)
    restored = model.unpack()
    for (first, a), (second, b) in zip(restored.named_arrays(), original.named_arrays(), strict=True):
        assert first == second
        np.testing.assert_array_equal(a, b)


@few_on_jax("name", [(name,) for name in MODELS], on_jax=[("encoder",)])
def test_any_library_computes_with_packed_weights(name, xp):
    model = MODELS[name]().pack()
    np.testing.assert_allclose(to_host(outputs(model.to(xp))), outputs(model), rtol=0.0, atol=1e-5)


def test_other_models_stay_as_they_are():
    model = MODELS["untied"]().to(dtype="float64")
    assert not is_packed(model.pack())
    np.testing.assert_array_equal(outputs(model.pack()), outputs(model))


@for_each("name", ["language_model", "untied", "transformer"])
@for_each("options", [{}, {"num_beams": 3}, {"do_sample": True, "temperature": 0.8}])
def test_models_generate_the_same_tokens(name, options):
    original = MODELS[name]()
    ids = [*IDS, [3, 8]]
    tokens = [
        [each[0].tokens for each in generate(model, ids, max_new_tokens=12, rng=xf.Rng(0), **options)]
        for model in (original, original.pack())
    ]
    assert tokens[0] == tokens[1]


@pytest.mark.parametrize("quantized", [None, "int8"])
def test_files_have_the_weights_of_the_original_model(quantized, tmp_path):
    original = MODELS["language_model"]() if quantized is None else MODELS["language_model"]().quantize(quantized)
    original.save(tmp_path / "a")
    original.pack().save(tmp_path / "b")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_packed_models_are_exported_but_not_trained(tmp_path):
    config = xf.LanguageModelConfig(
        vocab_size=13, num_layers=1, positions="learned", activation="gelu_tanh", scale_embeddings=False, **SIZES
    )
    model = xf.LanguageModel(config).pack()
    save_pretrained(model, tmp_path / "out")
    loaded = xf.load_pretrained(tmp_path / "out")
    np.testing.assert_allclose(outputs(loaded), outputs(model), rtol=0.0, atol=1e-5)
    with raises_line(ConfigError, "the model is packed for inference; train model.unpack()"):
        fit(model, lambda m, b, r: m(b).sum(), [IDS], optimizer=xf.Adam(), learning_rate=1e-3, steps=1)
