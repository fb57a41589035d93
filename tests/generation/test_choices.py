"""Programs that choose their own tokens give the outputs of searches whose tokens Python chooses."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import xformer as xf
from tests.reference import for_each
from xformer.generation import steps
from xformer.ops import decoding

is_native = decoding.is_native(np.zeros((1, 2), np.float32))
pytestmark = pytest.mark.skipif(not is_native, reason="the native library does not choose tokens")

SETTINGS = {
    "greedy": {},
    "sampling": {"do_sample": True},
    "temperature": {"temperature": 1.7, "num_return_sequences": 3},
    "top_k": {"top_k": 5, "stop_token_ids": [9, 12]},
    "top_p": {"top_p": 0.8, "suppress_tokens": [4, 8]},
    "min_p": {"min_p": 0.3, "special_tokens": False},
    "all": {"temperature": 0.7, "top_k": 15, "top_p": 0.9, "min_p": 0.01, "min_new_tokens": 4},
}


def definition(logits, uniforms=None, **settings):
    return decoding._choose(logits, uniforms, save=False, **settings)[0]


def models():
    sizes = {"d_model": 16, "num_heads": 2, "d_ff": 32}
    config = xf.LanguageModelConfig(vocab_size=27, num_layers=1, **sizes)
    yield xf.LanguageModel(config, seed=1), [[5, 4], [7], [9, 9, 9], [12, 3], [6], [7]]
    yield xf.LanguageModel(config, seed=2), [[5]]
    config = xf.TransformerConfig(
        source_vocab_size=27, target_vocab_size=27, num_encoder_layers=1, num_decoder_layers=1, **sizes
    )
    yield xf.Transformer(config, seed=3), [[5, 6, 7], [8, 9], [11, 5, 5, 12]]


@for_each("name", SETTINGS)
def test_outputs_equal_those_of_the_definition(monkeypatch, name):
    """With their log-probabilities; the cache grows, and later searches continue with the same programs."""
    monkeypatch.setattr(steps, "_CHUNK_TIME", 1e9)  # ever larger chunks
    made, read = [], steps.Choices.read_later
    monkeypatch.setattr(steps.Choices, "read_later", lambda *args: made.append(args[2]) or read(*args))
    for (model, inputs), seed, length in itertools.product(models(), range(3), (7, 45)):
        options = {"max_new_tokens": length, "rng": xf.Rng(seed)} | SETTINGS[name]
        if isinstance(model, xf.Transformer):
            options.pop("special_tokens", None)
        found = xf.generate(model, inputs, **options)
        with monkeypatch.context() as context:
            context.setattr(decoding, "is_native", lambda logits: False)
            context.setattr(decoding, "choose", definition)
            assert xf.generate(model, inputs, **options) == found
    assert max(made) > 4


@for_each("n", [1, 5, 27, 300, 2000])
def test_choices_have_the_bits_of_the_definition(n):
    rng = np.random.default_rng(n)
    options = itertools.product([1.0, 0.7, 1e-6], [0, 1, 40, 300, 10**6], [1.0, 0.9, 0.0, 1.0 - 1e-9], [0.0, 0.05, 1.0])
    for temperature, top_k, top_p, min_p in options:
        x = (rng.normal(size=(6, n)) * [[0.1], [1.0], [3.0], [3.0], [10.0], [1.0]]).astype(np.float32)
        x[1] = np.round(x[1])
        x[2:4, 1:] = np.where(rng.random((2, n - 1)) < 0.4, -np.inf, x[2:4, 1:])
        x[5] += 1e5
        uniforms = np.concatenate([[0.0, 1.0 - 2**-24], rng.random(4)]).astype(np.float32)
        settings = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
        np.testing.assert_array_equal(decoding.choose(x, uniforms, **settings), definition(x, uniforms, **settings))
    x[0, 0], x[1] = np.nan, -np.inf
    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(decoding.choose(x)[2:], definition(x)[2:])
        assert np.isnan(decoding.choose(x)[:2, 1]).all()


def test_a_row_without_a_possible_token_is_named():
    """Steps that the program made after it, too, are not read."""
    model, inputs = next(models())
    weight = next(array for name, array in model.named_parameters() if "embed" in name)
    weight[:] = np.nan
    with pytest.raises(xf.errors.DataError, match="input 1 has no possible token at position 3"):
        xf.generate(model, inputs, max_new_tokens=9)
