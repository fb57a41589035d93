"""The model's calls, parts and parameters, and dropout."""

from __future__ import annotations

import re

import numpy as np
import pytest

from tests.conftest import assert_close
from tests.reference import (
    SOURCE,
    TARGET,
    counted_calls,
    for_each,
    normal,
    raises_line,
    small_model,
    translation_loss,
    without_jax,
)
from xformer import Rng, Transformer, array_namespace, value_and_grad
from xformer.backends import dtype_name, from_host
from xformer.errors import ConfigError, ShapeError
from xformer.layers import FeedForward, Linear
from xformer.tree import flatten, map_arrays, replace


@without_jax
def test_ids_may_be_lists_numpy_arrays_or_arrays_of_the_library(xp):
    model = small_model(xp, num_encoder_layers=1, num_decoder_layers=1)
    expected = model(SOURCE, TARGET)
    assert expected.shape == (2, 4, 13)
    assert_close(model(SOURCE.tolist(), TARGET.tolist()), expected)
    assert_close(model(from_host(xp, SOURCE), from_host(xp, TARGET)), expected)


def test_encode_and_decode_equal_a_call():
    model = small_model()
    memory = model.encode(SOURCE)
    assert memory.shape == (2, 5, 8)
    assert_close(model.decode(TARGET, memory, source=SOURCE), model(SOURCE, TARGET))
    unmasked = model.decode(TARGET, memory)
    assert np.abs(unmasked - model(SOURCE, TARGET)).max() > 1e-3


def test_an_encoder_only_model_has_no_decoder_parameters(tmp_path):
    model = small_model(num_decoder_layers=0, output_bias=True, tie_output=False)
    names = {name.split(".")[0] for name, _ in model.named_parameters()}
    assert names == {"source_embedding", "encoder", "encoder_norm"}
    model.save(tmp_path / "m.safetensors")
    loaded = Transformer.load(tmp_path / "m.safetensors", xp="numpy")
    assert_close(loaded(SOURCE), model(SOURCE), tolerance=0.0)
    with raises_line(ConfigError, "this model has no decoder"):
        model(SOURCE, TARGET)
    with raises_line(ConfigError, "this model has no decoder"):
        model.prefill(SOURCE)


@for_each("layers", [1, 2])
def test_layers_with_a_window_have_wavelengths_of_their_own(layers):
    types = ("sliding_attention", "full_attention")[:layers]
    sizes = {"positions": "rotary", "window": 3, "layer_types": types, "rope_theta": 50.0}
    sizes |= {"num_encoder_layers": layers, "num_decoder_layers": layers}
    model = small_model(rope_local_theta=7.0, **sizes)
    for positions in (model.encoder_positions, model.decoder_positions):
        assert [each.base for each in positions] == [7.0, 50.0][:layers]
    full = model(SOURCE, TARGET)
    assert np.abs(small_model(**sizes)(SOURCE, TARGET) - full).max() > 1e-4
    assert_close(small_model(rope_local_theta=50.0, **sizes)(SOURCE, TARGET), small_model(**sizes)(SOURCE, TARGET))
    cache = model.prefill(SOURCE)
    first = model.decode_step(TARGET[:, :1], cache)
    assert_close(first, full[:, 0])
    cache = model.to_static(cache, 4)
    assert_close(model.decode_step(TARGET[:, 1:2], cache), full[:, 1])


def test_one_hot_rows_stand_for_ids_and_have_a_gradient(xp):
    model = small_model(xp, num_encoder_layers=1, num_decoder_layers=1)
    rows = from_host(xp, np.eye(11)[SOURCE])
    assert_close(model(rows, TARGET), model(SOURCE, TARGET), tolerance=1e-12)
    _, (_, gradient) = value_and_grad(lambda inputs: xp_sum(inputs[0](inputs[1], TARGET)))((model, rows))
    assert tuple(gradient.shape) == (2, 5, 11)
    assert float(xp.max(xp.abs(gradient[1, 3:, :]))) == 0.0  # padding
    assert float(xp.max(xp.abs(gradient[1, :3, :]))) > 1e-3


def xp_sum(y):
    return array_namespace(y).sum(y * y)


def test_rematerialization_recomputes_layers_and_changes_no_gradient(monkeypatch):
    settings = {"dropout": 0.2, "attention_dropout": 0.2, "positions": "relative"}
    calls = counted_calls(monkeypatch, FeedForward)
    found = []
    for flag, expected in ((False, 4), (True, 8)):  # two layers on each side, each of them run once or twice
        model = small_model(rematerialize=flag, **settings)
        found.append(value_and_grad(lambda model: translation_loss(model, rng=Rng(1)))(model))
        assert len(calls) == expected
        calls.clear()
    assert_close(found[0][0], found[1][0], tolerance=0.0)
    for one, other in zip(*(flatten(gradients)[0] for _, gradients in found), strict=True):
        assert_close(one, other, tolerance=1e-14)


def test_lengths_require_a_length_encoding():
    with raises_line(ConfigError, "lengths was passed to a model without a length encoding"):
        small_model().prefill(SOURCE, lengths=[3, 4])
    model = small_model(length_encoding=True)
    with raises_line(ConfigError, "this model has a length encoding; expected lengths, one per source"):
        model.prefill(SOURCE)
    memory = model.encode(SOURCE)
    seen = model.decode(TARGET, memory, source=SOURCE, lengths=[4, 2])
    assert_close(seen, model(SOURCE, TARGET))  # as long as the target is
    assert np.abs(model.decode(TARGET, memory, source=SOURCE, lengths=[5, 2]) - seen)[0].max() > 1e-4
    weights = model.cross_attention_weights(SOURCE, TARGET, lengths=[5, 2])[-1]
    assert np.abs(weights - model.cross_attention_weights(SOURCE, TARGET)[-1])[0].max() > 1e-6
    with raises_line(ShapeError, r"lengths has shape \(1,\) and dtype int64; expected integers of shape \(2,\)"):
        model.decode(TARGET, memory, source=SOURCE, lengths=[5])


def test_a_copying_model_needs_the_source():
    model = small_model(source_vocab_size=13, share_embeddings=True, copy=True)
    memory = model.encode(SOURCE)
    assert_close(model.decode(TARGET, memory, source=SOURCE), model(SOURCE, TARGET))
    with raises_line(ConfigError, "this model copies from the source; pass source="):
        model.decode(TARGET, memory)


@without_jax
def test_decoding_projects_the_memory_for_the_copy_head_once(xp, monkeypatch):
    model = small_model(xp, source_vocab_size=13, share_embeddings=True, copy=True)
    head, seen = type(model.copy_head), []
    call = head.__call__
    monkeypatch.setattr(head, "__call__", lambda self, *given: seen.append(given) or call(self, *given))
    projected, project = [], Linear.__call__

    def noted(self, *given):
        projected.append(self is model.copy_head.key)
        return project(self, *given)

    monkeypatch.setattr(Linear, "__call__", noted)
    cache = model.prefill(SOURCE)
    target = np.asarray([[1, 7, 3, 5], [1, 4, 9, 6]])
    found = [model.decode_step(from_host(xp, target[:, [column]]), cache) for column in range(3)]
    cache.reorder([1, 1], [1])
    shared = model.decode_step(from_host(xp, target[[1, 0], 3:]), cache)
    assert sum(projected) == 1
    for logits, given in zip(found, seen[:3], strict=True):
        assert_close(logits, call(model.copy_head, *given[:5])[:, 0, :], tolerance=0.0)
    full = model(SOURCE[[1, 1]], [[*target[1, :3], target[row, 3]] for row in (1, 0)])
    assert_close(shared, full[:, 3, :])


def test_cross_attention_weights_sum_to_one_and_are_zero_for_padding():
    first, second = small_model().cross_attention_weights(SOURCE, TARGET)
    assert first.shape == second.shape == (2, 2, 4, 5)
    np.testing.assert_allclose(second.sum(axis=-1), 1.0)
    assert (second[0, :, :, 4:] == 0.0).all()
    assert (second[1, :, :, 3:] == 0.0).all()


def test_the_configuration_decides_which_parameters_exist():
    names = dict(small_model().named_parameters())
    assert "target_embedding.weight" in names
    assert "encoder_norm.weight" in names
    assert {"output.weight", "output_bias"} & names.keys() == set()
    names = dict(
        small_model(
            source_vocab_size=13, share_embeddings=True, tie_output=False, output_bias=True, norm_position="post"
        ).named_parameters()
    )
    assert "target_embedding.weight" not in names
    assert "encoder_norm.weight" not in names
    assert names["output.weight"].shape == (8, 13)
    assert names["output_bias"].shape == (13,)
    assert "encoder.0.self_attention.query.bias" in names
    names = dict(small_model(attention_bias=False).named_parameters())
    assert "encoder.0.self_attention.query.bias" not in names
    assert "encoder.0.feed_forward.up.bias" in names


@for_each(
    "setting, names, variant",
    [
        ("feed_forward_bias", r"\.feed_forward\.\w+\.bias$", {"activation": "gelu"}),
        ("feed_forward_bias", r"\.feed_forward\.\w+\.bias$", {"activation": "swiglu"}),
        ("norm_bias", r"norm\.bias$", {"norm": "layer", "embedding_norm": True}),
        ("norm_bias", r"norm\.bias$", {"norm": "max_scaled", "norm_position": "post"}),
    ],
)
def test_a_model_without_biases_equals_one_with_zero_biases(setting, names, variant):
    model, full = small_model(**{setting: False}, **variant), small_model(**variant)
    model = map_arrays(lambda array: array + 0.1 * normal(array.size, *array.shape), model)
    arrays, fresh = dict(model.named_parameters()), dict(full.named_parameters())
    zeros = {name: np.zeros_like(array) for name, array in fresh.items() if re.search(names, name)}
    assert zeros
    assert zeros.keys() == fresh.keys() - arrays.keys()
    logits = model(SOURCE, TARGET)
    assert np.isfinite(logits).all()
    assert_close(logits, replace(full, arrays | zeros)(SOURCE, TARGET), tolerance=1e-14)


def test_parameters_are_counted():
    # Two tables, then layers of 4 or 8 projections with biases, a feed-forward, and norms; then two last norms.
    projection, feed_forward, norm = 8 * 8 + 8, 8 * 12 + 12 + 12 * 8 + 8, 2 * 8
    expected = 11 * 8 + 13 * 8 + 2 * (4 * projection + feed_forward + 2 * norm)
    expected += 2 * (8 * projection + feed_forward + 3 * norm) + 2 * norm
    assert small_model().parameter_count() == expected


@for_each("dtype", ["float32", "float64"])
def test_logits_and_gradients_have_the_dtype_of_the_parameters(dtype):
    model = small_model(dtype=dtype, dropout=0.2, attention_dropout=0.2)
    assert model(SOURCE, TARGET).dtype == dtype
    _, gradients = value_and_grad(lambda model: translation_loss(model))(model)
    assert {array.dtype.name for _, array in gradients.named_parameters()} == {dtype}


def test_bfloat16_stays_bfloat16():
    torch = pytest.importorskip("torch", reason="NumPy has no bfloat16")
    model = small_model(torch, dtype="bfloat16")
    logits = model(SOURCE, TARGET)
    assert logits.dtype == torch.bfloat16
    assert_close(logits.to(torch.float64), small_model()(SOURCE, TARGET), xp=torch, tolerance=0.1)
    loss, gradients = value_and_grad(translation_loss)(model)
    assert loss.dtype == torch.float32
    assert {array.dtype for _, array in gradients.named_parameters()} == {torch.bfloat16}


# --- Dropout ----------------------------------------------------------------------------------------------------------

EVERYWHERE = {"dropout": 0.3, "attention_dropout": 0.2, "activation_dropout": 0.1}


def test_dropout_needs_an_rng():
    assert_close(small_model(**EVERYWHERE)(SOURCE, TARGET), small_model(dropout=0.0)(SOURCE, TARGET))


@for_each("option", EVERYWHERE)
def test_each_dropout_acts_when_an_rng_is_passed(option):
    model = small_model(**{"dropout": 0.0, option: 0.3})
    first = model(SOURCE, TARGET, rng=Rng(0))
    np.testing.assert_array_equal(first, model(SOURCE, TARGET, rng=Rng(0)))
    assert np.abs(first - model(SOURCE, TARGET, rng=Rng(1))).max() > 1e-3
    assert np.abs(first - model(SOURCE, TARGET)).max() > 1e-3


def test_dropouts_draw_different_masks(monkeypatch):
    """Every draw of one forward pass comes from a stream of its own."""
    keys, draw = [], Rng.bernoulli

    def watched(self, *arguments):
        keys.append(self.key)
        return draw(self, *arguments)

    monkeypatch.setattr(Rng, "bernoulli", watched)
    small_model(**EVERYWHERE)(SOURCE, TARGET, rng=Rng(0))
    assert len(keys) == 2 + 2 * 4 + 2 * 6
    assert len(set(keys)) == len(keys)


def test_gradients_under_dropout_belong_to_the_drawn_mask():
    model, step = small_model(**EVERYWHERE), 1e-6

    def loss(model):
        return (model(SOURCE, TARGET, rng=Rng(3)) ** 2).sum()

    def traced_loss(model):
        logits = model(SOURCE, TARGET, rng=Rng(3))
        return logits.__array_namespace__().sum(logits**2)

    _, gradients = value_and_grad(traced_loss)(model)
    weight, gradient = model.decoder[1].feed_forward.up.weight, gradients.decoder[1].feed_forward.up.weight
    direction = normal(0, *weight.shape)
    weight += step * direction
    above = loss(model)
    weight -= 2 * step * direction
    np.testing.assert_allclose((above - loss(model)) / (2 * step), (gradient * direction).sum(), rtol=1e-6)


# --- Bad input --------------------------------------------------------------------------------------------------------


def test_a_memory_of_another_shape_is_refused():
    model = small_model()
    for shape in ((2, 5), (3, 5, 8), (2, 5, 7)):
        with raises_line(ShapeError, r"memory has shape .*; expected \(2, source length, 8\)"):
            model.decode(TARGET, np.zeros(shape))


@for_each("dtype", [np.float64, np.dtype("float64"), "float64"])
def test_a_dtype_can_be_a_name_or_that_of_another_library(xp, dtype):
    model = small_model(xp, dtype=dtype, num_encoder_layers=0, num_decoder_layers=0)
    assert dtype_name(model.source_embedding.weight.dtype) == "float64"
    assert xp.name in type(model.source_embedding.weight).__module__
