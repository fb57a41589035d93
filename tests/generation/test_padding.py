"""Prompts and prefixes of different lengths in one batch: each output is that of its prompt alone."""

from __future__ import annotations

import numpy as np
import pytest

import xformer as xf
from tests.reference import for_each
from xformer.backends import to_host
from xformer.errors import ConfigError
from xformer.models.config import POSITIONS

SIZES = {"d_model": 16, "num_heads": 2, "d_ff": 32, "max_positions": 64}
PROMPTS = [[3, 4, 5, 6, 7, 8, 9, 10, 11, 12], [5], [7, 8, 9], [3] * 30]
MODES = {
    "greedy": {},
    "beams": {"num_beams": 3},
    "samples": {"do_sample": True, "num_return_sequences": 2},
    "few tokens": {"max_new_tokens": 3},
}


def outputs(model, prompts, indices, **options):
    options = {"max_new_tokens": 20, "rng": xf.Rng(0), "indices": indices, **options}
    return [[(each.tokens, each.log_probability) for each in row] for row in xf.generate(model, prompts, **options)]


def assert_independent(model, prompts, xp=np, **options):
    """Compare the outputs of all prompts, on any library, with those of each prompt on NumPy."""
    together = outputs(model.to(xp), prompts, range(len(prompts)), **options)
    for index, prompt in enumerate(prompts):
        each = {name: [value[index]] if name == "prefix" else value for name, value in options.items()}
        (alone,) = outputs(model, [prompt], [index], **each)
        assert [tokens for tokens, _ in together[index]] == [tokens for tokens, _ in alone]
        np.testing.assert_allclose(
            [score for _, score in together[index]], [score for _, score in alone], rtol=0, atol=1e-3
        )


@for_each("options", MODES.values())
@for_each("window", [None, 4])
@for_each("positions", POSITIONS)
def test_a_prompt_does_not_depend_on_longer_ones(positions, window, options):
    config = xf.LanguageModelConfig(vocab_size=23, num_layers=2, positions=positions, window=window, **SIZES)
    assert_independent(xf.LanguageModel(config), PROMPTS, **options)


@for_each("positions", ["learned", "rotary"])
def test_on_any_library(positions, xp):
    config = xf.LanguageModelConfig(vocab_size=23, num_layers=1, positions=positions, **SIZES)
    assert_independent(xf.LanguageModel(config), PROMPTS[:3], xp, max_new_tokens=3)


@for_each("options", [{}, {"num_beams": 3}])
@for_each("positions", ["sinusoidal", "learned", "relative"])
def test_a_prefix_does_not_depend_on_longer_ones(positions, options):
    layers = {"num_encoder_layers": 1, "num_decoder_layers": 2}
    config = xf.TransformerConfig(
        source_vocab_size=23, target_vocab_size=23, positions=positions, length_encoding=False, **layers, **SIZES
    )
    prefix = [[5, 6, 7, 8], [], [9]]
    assert_independent(xf.Transformer(config), [[4, 5, 6]] * 3, prefix=prefix, **options)


def test_logits_before_padding_are_those_of_the_prompt():
    model = xf.LanguageModel(xf.LanguageModelConfig(vocab_size=23, num_layers=2, **SIZES))
    cache = model.init_cache(2)
    logits = model.decode_step(np.asarray([[3, 4, 5, 6], [7, 0, 0, 0]]), cache, np.asarray([4, 1]))
    np.testing.assert_allclose(logits[0], to_host(model([[3, 4, 5, 6]]))[0, -1], atol=1e-5)
    np.testing.assert_allclose(logits[1], to_host(model([[7]]))[0, -1], atol=1e-5)
    with pytest.raises(ConfigError, match=r"^rows of different lengths take no further tokens; use model.to_static"):
        model.decode_step(np.asarray([[4], [2]]), cache)
    cache = model.to_static(cache, 8)
    for column in ([8, 9], [4, 2]):
        logits = model.decode_step(np.asarray(column)[:, None], cache)
    np.testing.assert_allclose(logits[0], to_host(model([[3, 4, 5, 6, 8, 4]]))[0, -1], atol=1e-5)
    np.testing.assert_allclose(logits[1], to_host(model([[7, 9, 2]]))[0, -1], atol=1e-5)
