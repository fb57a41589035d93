"""Analyses on every array library, of other architectures, and wrong calls; see also test_transformer_lens.py."""

from __future__ import annotations

import dataclasses
from unittest.mock import Mock

import numpy as np
import pytest

import xformer as xf
from tests.conftest import assert_close
from tests.reference import raises_line, small_language_model, small_model, without_jax
from xformer import interpret
from xformer.backends import array_namespace
from xformer.errors import ConfigError, DataError, ShapeError

TOKENS, SOURCE = [[5, 4, 7, 5], [3, 10, 3, 6]], [[5, 9, 7, 5], [3, 8, 3, 6]]
LLAMA = {"norm": "rms", "activation": "swiglu", "positions": "rotary", "num_heads": 4, "num_key_value_heads": 2}
METRIC = interpret.logit_difference([5, 3], [6, 6])
ANALYSES = {
    "logit_lens": lambda model: interpret.logit_lens(model, TOKENS),
    "attribution": lambda model: interpret.direct_logit_attribution(model, TOKENS, [5, 3]).heads,
    "head_ablation": lambda model: interpret.head_ablation(model, TOKENS, METRIC),
    "feed_forward_ablation": lambda model: interpret.feed_forward_ablation(model, TOKENS, METRIC, value="mean"),
    "activation_patching": lambda model: interpret.activation_patching(model, TOKENS, SOURCE, METRIC),
    "attribution_patching": lambda model: interpret.attribution_patching(model, TOKENS, SOURCE, METRIC, part="heads"),
    "attention_rollout": lambda model: interpret.attention_rollout(model, TOKENS, residual=0.3),
    "attention_entropy": lambda model: interpret.attention_entropy(model, TOKENS),
    "previous_token_scores": lambda model: interpret.previous_token_scores(model, TOKENS),
    "duplicate_token_scores": lambda model: interpret.duplicate_token_scores(model, TOKENS),
    "induction_scores": lambda model: interpret.induction_scores(model, length=4, batch_size=2),
}


@without_jax
def test_every_library_gives_the_same(xp):
    model = small_language_model(xp, **LLAMA)
    plain = model.to("numpy")
    for analysis in ANALYSES.values():
        assert_close(analysis(model), analysis(plain), xp=xp)
    tokens, targets = xp.asarray(TOKENS), xp.asarray([5, 3])
    assert_close(interpret.induction_scores(model, tokens), interpret.induction_scores(plain, TOKENS), xp=xp)
    parts = interpret.direct_logit_attribution(model, tokens, targets, 6)
    assert_close(parts.heads, interpret.direct_logit_attribution(plain, TOKENS, [5, 3], [6, 6]).heads, xp=xp)
    effects = interpret.head_ablation(model, tokens, interpret.logit_difference(targets, 6))
    assert_close(effects, interpret.head_ablation(plain, TOKENS, METRIC), xp=xp)


@pytest.mark.parametrize(
    "settings",
    [
        {"parallel_residual": True, "residual_scale": 0.5, "layer_scale": True},
        {"parallel_residual": True, "shared_norm": True, "tie_output": False, "attention_sinks": True},
        {"num_experts": 2, "logits_scale": 0.25, "output_bias": True, "scale_output": True, "final_norm": True},
    ],
)
def test_the_parts_of_a_logit_add_up(settings):
    model = small_language_model(**settings)
    model = xf.tree.map_arrays(lambda x: x + 0.1 * np.random.default_rng(x.size).normal(size=x.shape), model)
    parts = interpret.direct_logit_attribution(model, TOKENS, [5, 3], [2, 9])
    total = parts.embeddings + parts.heads.sum((0, 2)) + (parts.attention_bias + parts.feed_forward).sum(0)
    logits = model(TOKENS)[:, -1]
    assert_close(total + parts.constant, logits[[0, 1], [5, 3]] - logits[[0, 1], [2, 9]])


def test_small_patches_are_attributed_exactly():
    """Both analyses agree as the source approaches the tokens, here by embeddings that hardly differ."""
    model = small_language_model(positions="rotary")
    table = np.asarray(model.embedding.weight).copy()
    table[9] = table[4] + 1e-5 * table[9]
    table[8] = table[10] - 1e-5 * table[8]
    model = xf.tree.with_fields(model, embedding=xf.tree.with_fields(model.embedding, weight=table))
    for part in ("residual", "heads", "feed_forward"):
        exact, estimate = (
            analysis(model, TOKENS, SOURCE, METRIC, part=part)
            for analysis in (interpret.activation_patching, interpret.attribution_patching)
        )
        assert np.max(np.abs(exact)) > 1e-7
        np.testing.assert_allclose(estimate, exact, atol=1e-3 * np.max(np.abs(exact)))


def test_attention_of_known_models():
    model = small_language_model(num_heads=1, num_layers=1)
    length = np.arange(1, 5)
    layer = model.layers[0].self_attention
    zeros = xf.tree.map_arrays(np.zeros_like, layer)  # attends to all tokens alike
    layer = xf.tree.with_fields(model.layers[0], self_attention=zeros)
    model = xf.tree.with_fields(model, layers=(layer,))
    assert_close(interpret.attention_entropy(model, TOKENS)[0, 0, 0], np.log(length), xp=np)
    rollout = interpret.attention_rollout(model, TOKENS, residual=0.0)
    assert_close(rollout[1], np.tril(np.ones((4, 4))) / length[:, None], xp=np)
    assert_close(interpret.attention_rollout(model, TOKENS, residual=1.0)[1], np.eye(4), xp=np)
    assert_close(interpret.previous_token_scores(model, TOKENS), np.mean([[[1 / 2, 1 / 3, 1 / 4]]], axis=2), xp=np)
    assert_close(interpret.duplicate_token_scores(model, TOKENS), [[(1 / 4 + 1 / 3) / 2]], xp=np)
    assert_close(interpret.induction_scores(model, TOKENS), [[(1 / 4 + 1 / 3) / 2]], xp=np)


def test_encoders_quantized_models_and_derivatives():
    encoder = xf.Encoder(xf.EncoderConfig(vocab_size=13, d_model=8, num_heads=2, d_ff=12, num_layers=2))

    def mean(states):
        return array_namespace(states).mean(states[:, 0, :] ** 2)

    assert interpret.attention_rollout(encoder, TOKENS).shape == (2, 4, 4)
    assert interpret.head_ablation(encoder, TOKENS, mean).shape == (2, 2)
    assert interpret.activation_patching(encoder, TOKENS, SOURCE, mean, part="feed_forward").shape == (2, 4)
    shared = xf.Encoder(dataclasses.replace(encoder.config, share_layers=True))
    assert interpret.head_ablation(shared, TOKENS, mean).shape == (2, 2)
    assert len(np.unique(interpret.feed_forward_ablation(shared, TOKENS, mean))) == 2
    for analysis in (interpret.activation_patching, interpret.attribution_patching):
        assert analysis(shared, TOKENS, SOURCE, mean, part="heads").shape == (2, 2)
    model = small_language_model(dtype="float32", d_model=64, bos_id=None)
    for other in (model.pack(), model.quantize()):
        for name, analysis in ANALYSES.items():
            assert_close(analysis(other), analysis(model), tolerance=0.05), name
    value, gradient = xf.value_and_grad(
        lambda model: array_namespace(x := interpret.attention_entropy(model, TOKENS)).mean(x)
    )(model)
    assert np.isfinite(value)
    assert np.any(gradient.layers[0].self_attention.query.weight)


def test_wrong_calls():
    model = small_language_model()
    for analysis in ANALYSES.values():
        with raises_line(ConfigError, "model is a Transformer; expected LanguageModel"):
            analysis(small_model())
    with raises_line(DataError, "token ids range from 99 to 99"):
        interpret.logit_lens(model, [[99]])
    with raises_line(ConfigError, r"the logits are no sum of parts \(norm 'layer', norm_position 'post'"):
        interpret.direct_logit_attribution(small_language_model(norm_position="post"), TOKENS, [1, 2])
    for targets, message in (
        ([1], "targets has 1 tokens for 2 rows; expected one each, or an integer for all"),
        ([1, 13], "targets has token id 13; expected 0 to 12"),
        (-1, "targets has token id -1; expected 0 to 12"),
        ("ab", "targets is 'ab'; expected a list of integers"),
        (1.5, "targets is 1.5; expected a list of integers"),
    ):
        with raises_line(DataError, message):
            interpret.direct_logit_attribution(model, TOKENS, targets)
        with raises_line(DataError, message):
            interpret.head_ablation(model, TOKENS, interpret.logit_difference(targets, 3))
    with raises_line(DataError, r"the logits have shape \(0, 3, 13\); expected at least one row"):
        interpret.head_ablation(model, np.zeros((0, 3), int), METRIC)
    with raises_line(ShapeError, r"token ids are text; expected integers \(batch, length\), e.g. \[tokenizer.encode"):
        interpret.logit_lens(model, "A text")
    with raises_line(ConfigError, r"model is an? \w+ \(pass its .model\); expected LanguageModel or Encoder"):
        interpret.attention_entropy(Mock(model=model), TOKENS)
    with raises_line(ConfigError, r"metric is a ndarray; expected a function, e.g. logit_difference\(...\)"):
        interpret.head_ablation(model, TOKENS, np.ones(3))
    with raises_line(ConfigError, "value is 'median'; expected 'zero' or 'mean'"):
        interpret.head_ablation(model, TOKENS, METRIC, value="median")
    for metric, received in ((lambda y: 1.0, "a float"), (lambda y: y, r"an array of shape \(2, 4, 13\)")):
        message = f"the metric returned {received}; expected a floating scalar array"
        with raises_line(ConfigError, message):
            interpret.head_ablation(model, TOKENS, metric)
        with raises_line(ConfigError, message):
            interpret.attribution_patching(model, TOKENS, SOURCE, metric)
    for analysis in (interpret.activation_patching, interpret.attribution_patching):
        with raises_line(ConfigError, "part is 'neurons'; expected one of heads, residual, feed_forward"):
            analysis(model, TOKENS, SOURCE, METRIC, part="neurons")
        message = r"source has activations of shape \(2, 3, 8\), tokens of shape \(2, 4, 8\); expected the same"
        with raises_line(ShapeError, message):
            analysis(model, TOKENS, np.asarray(SOURCE)[:, :3], METRIC)
    for residual in (2, "half"):
        with raises_line(ConfigError, f"residual is {residual!r}; expected a number in \\[0, 1\\]"):
            interpret.attention_rollout(model, TOKENS, residual=residual)
    for analysis in (interpret.duplicate_token_scores, interpret.induction_scores):
        with raises_line(ShapeError, r"tokens of shape \(1, 3\) have no such pair of positions; expected at least one"):
            analysis(model, [[1, 2, 3]])
    with raises_line(ConfigError, "length is 0; expected"):
        interpret.induction_scores(model, length=0)
    with raises_line(ConfigError, "the model has no layers; expected LanguageModel or Encoder with at least one"):
        interpret.attention_entropy(small_language_model(num_layers=0), TOKENS)
