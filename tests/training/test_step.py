import importlib
import math
import types

import numpy as np
import pytest

from tests.conftest import assert_close
from tests.reference import for_each, raises_line, without_jax
from xformer import value_and_grad
from xformer.backends import to_host
from xformer.errors import ConfigError, DataError
from xformer.models import Transformer, TransformerConfig
from xformer.random import Rng
from xformer.training import (
    SGD,
    Adafactor,
    Adam,
    Batch,
    Muon,
    TokenPairs,
    clip_by_global_norm,
    data_parallel,
    train_step,
    translation_loss,
)
from xformer.training.step import accumulate, clip_scale
from xformer.tree import flatten

CONFIG = TransformerConfig(
    source_vocab_size=9,
    target_vocab_size=9,
    d_model=8,
    num_heads=2,
    d_ff=16,
    num_encoder_layers=1,
    num_decoder_layers=1,
    dropout=0.0,
)
PAIRS = TokenPairs([[4, 5, 6], [7, 8], [4, 4]], [[5], [6, 7, 8], [8, 7]])


def step(xp, *batches, max_grad_norm=math.inf, **options):
    """Make one update from batches, which are given as row numbers."""
    model = Transformer(CONFIG, xp=xp, seed=0, dtype="float64")
    optimizer = Adam()
    return train_step(
        model,
        optimizer.init(model),
        [Batch.make(PAIRS, rows, xp=xp) for rows in batches],
        Rng(0),
        loss_fn=translation_loss,
        optimizer=optimizer,
        learning_rate=1e-2,
        max_grad_norm=max_grad_norm,
        **options,
    )


def test_a_step_lowers_the_loss(xp):
    before = step(xp, [0, 1, 2])
    batch = Batch.make(PAIRS, [0, 1, 2], xp=xp)
    after = float(translation_loss(before.model, batch))
    assert after / batch.num_tokens < float(before.loss)
    assert after == float(translation_loss(before.model, Batch.make(PAIRS, [0, 1, 2], xp=np)))
    assert before.state.step == 1


def test_every_library_makes_the_same_step(xp):
    expected, result = step(np, [0, 1, 2]), step(xp, [0, 1, 2])
    assert float(result.loss) == pytest.approx(float(expected.loss), rel=1e-10)
    assert float(result.grad_norm) == pytest.approx(float(expected.grad_norm), rel=1e-10)
    for name, array in result.model.named_parameters():
        assert_close(array, dict(expected.model.named_parameters())[name], xp=xp, tolerance=1e-8)


@for_each("workers", [1, 2, 3])
def test_shards_make_the_step_of_one_batch(workers):
    complete, parts = step(np, [0, 1, 2]), step(np, [0, 1, 2], value_and_grad=data_parallel(workers))
    assert float(parts.loss) == pytest.approx(float(complete.loss), rel=1e-12)
    for one, other in zip(flatten(parts.state.exp_avg)[0], flatten(complete.state.exp_avg)[0], strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-12)


@without_jax
def test_accumulated_batches_make_the_step_of_one_batch(xp):
    """They have different numbers of tokens, and each token weighs the same."""
    counts = [Batch.make(PAIRS, rows, xp=np).num_tokens for rows in ([0], [1, 2])]
    assert counts == [2, 7]
    complete, parts = step(xp, [0, 1, 2]), step(xp, [0], [1, 2])
    assert float(parts.loss) == pytest.approx(float(complete.loss), rel=1e-12)
    assert float(parts.grad_norm) == pytest.approx(float(complete.grad_norm), rel=1e-12)
    for one, other in zip(flatten(parts.state.exp_avg)[0], flatten(complete.state.exp_avg)[0], strict=True):
        assert_close(one, other, tolerance=1e-12)


def test_batches_are_differentiated_one_at_a_time_with_their_own_rng():
    calls = []

    def loss_and_grads(model, batch, rng):
        calls.append((batch, rng))
        return np.asarray(1.0), [np.ones(2)]

    loss, grads = accumulate(loss_and_grads, None, ["a", "b"], Rng(3))
    assert (float(loss), grads[0].tolist()) == (2.0, [2.0, 2.0])
    assert calls == list(zip(["a", "b"], Rng(3).split(2), strict=True))
    with raises_line(ConfigError, "batches is empty"):
        accumulate(loss_and_grads, None, [], None)


@for_each("num_tokens", [0, -1, math.nan, np.int64(0), np.asarray(0), "3"])
def test_without_tokens_there_is_no_step(num_tokens):
    def run(batches, num_tokens=None):
        optimizer, model = SGD(), {"x": np.ones(3)}
        options = {"loss_fn": lambda model, batch, rng: model["x"].sum(), "optimizer": optimizer, "learning_rate": 0.1}
        train_step(model, optimizer.init(model), batches, None, num_tokens=num_tokens, **options)

    with raises_line(DataError, "num_tokens is .* for 1 batches; expected at least 1"):
        run([None], num_tokens)
    with raises_line(DataError, "num_tokens is 0 for 1 batches; expected at least 1"):
        run([types.SimpleNamespace(num_tokens=0)])
    with raises_line(DataError, "num_tokens is 0 for 0 batches; expected at least 1"):
        run([])


@for_each("optimizer", [Adam(), SGD(), Muon(), Adafactor()])
@for_each("kind", [np.asarray, np.float32])
def test_parameters_without_axes(optimizer, kind):
    """They and their gradients may be scalars of NumPy."""

    def loss(model, batch, rng):
        return model["scale"] * model["scale"] * batch

    def trained(dtype, kind):
        model = {"scale": kind(np.asarray(1.5, dtype))}
        options = {"loss_fn": loss, "optimizer": optimizer, "learning_rate": 0.1, "num_tokens": 1}
        first = train_step(model, optimizer.init(model), [np.asarray(3.0, dtype)], None, **options)
        return train_step(first.model, first.state, [np.asarray(2.0, dtype)], None, donate=True, **options)

    single, double = trained(np.float32, kind), trained(np.float64, np.asarray)
    assert single.model["scale"].dtype == np.float32
    np.testing.assert_allclose(single.model["scale"], double.model["scale"], rtol=1e-6)
    np.testing.assert_allclose(single.grad_norm, double.grad_norm, rtol=1e-6)


def test_clipping_scales_all_gradients_together(xp):
    grads = [xp.asarray([3.0, 0.0]), xp.asarray([[4.0]])]
    clipped, norm = clip_by_global_norm(grads, 1.0)
    assert float(norm) == pytest.approx(5.0)
    assert [to_host(leaf).tolist() for leaf in clipped] == [[pytest.approx(0.6), 0.0], [[pytest.approx(0.8)]]]
    untouched, _ = clip_by_global_norm(grads, 6.0)
    assert [to_host(leaf).tolist() for leaf in untouched] == [[3.0, 0.0], [[4.0]]]


NONFINITE = [(math.nan, 1.0), (math.inf, 1.0), (1.0, math.nan), (1.0, math.inf)]


@for_each("loss, element", NONFINITE)
@for_each("optimizer", [Adam(), Muon(), SGD(), Adafactor()])
@for_each("donate", [True, False])
def test_a_nonfinite_loss_or_gradient_changes_nothing(xp, optimizer, loss, element, donate):
    tree = [xp.asarray([[1.0, 2.0]]), xp.asarray([3.0])]

    def with_gradient(function):
        return lambda model, batch, rng, weight: (xp.asarray(loss), [xp.asarray([[0.0, element]]), xp.asarray([0.0])])

    result = train_step(
        tree, optimizer.init(tree), [None], None, loss_fn=None, optimizer=optimizer, learning_rate=0.1,
        max_grad_norm=1.0, num_tokens=1, value_and_grad=with_gradient, donate=donate,
    )  # fmt: skip
    assert [to_host(leaf).tolist() for leaf in result.model] == [[[1.0, 2.0]], [3.0]]
    assert all(not to_host(leaf).any() for leaf in flatten(result.state)[0])


def test_the_scale_clips_and_unscales(xp):
    for norm, max_grad_norm, expected in [(4.0, 1.0, 0.25), (4.0, 4.0, 0.5), (4.0, math.inf, 0.5), (0.0, 1.0, 0.5)]:
        for loss_scale in (2.0, xp.asarray(2.0)):
            assert float(clip_scale(xp.asarray(8.0), xp.asarray(norm), max_grad_norm, loss_scale)) == expected
    for max_grad_norm in (1e-46, 1e35, 1e39, math.inf):  # beyond what float32 holds, once scaled
        for norm in (0.0, 4.0):
            scale = float(clip_scale(xp.asarray(8.0), xp.asarray(norm, dtype=xp.float32), max_grad_norm, 2.0**16))
            assert scale < 1e-30 if norm > max_grad_norm else scale == 2.0**-16
    for loss, norm in NONFINITE:
        assert math.isnan(float(clip_scale(xp.asarray(loss), xp.asarray(norm), math.inf)))


@pytest.mark.parametrize("xp", ["jax"], indirect=True)
def test_a_loss_scale_in_an_array_is_not_read_on_the_host(xp):
    for norm, max_grad_norm, expected in [(4.0, 1.0, 0.25), (4.0, 4.0, 0.5)]:
        jitted = importlib.import_module("jax").jit(clip_scale, static_argnums=2)
        assert float(jitted(xp.asarray(8.0), xp.asarray(norm), max_grad_norm, xp.asarray(2.0))) == expected


@for_each("max_grad_norm", [0.0, -1.0, math.nan])
def test_an_invalid_norm_is_refused(max_grad_norm):
    with raises_line(ConfigError, f"^max_grad_norm is {max_grad_norm}; expected a number above 0"):
        clip_by_global_norm([np.ones(2)], max_grad_norm)
    with raises_line(ConfigError, f"^max_grad_norm is {max_grad_norm}; expected a number above 0"):
        step(np, [0], max_grad_norm=max_grad_norm)


def test_the_step_is_what_its_parts_make():
    """Written out with the public functions."""
    model, batch = Transformer(CONFIG, xp=np, seed=0, dtype="float64"), Batch.make(PAIRS, [0, 1], xp=np)
    loss, grads = value_and_grad(translation_loss)(model, batch)
    mean = [leaf / batch.num_tokens for leaf in flatten(grads)[0]]
    clipped, norm = clip_by_global_norm(flatten(grads)[1](mean), 0.5)
    expected, _ = Adam().update(model, clipped, Adam().init(model), 1e-2)
    result = step(np, [0, 1], max_grad_norm=0.5)
    assert float(result.loss) == pytest.approx(float(loss) / batch.num_tokens)
    assert float(result.grad_norm) == pytest.approx(float(norm))
    for one, other in zip(flatten(result.model)[0], flatten(expected)[0], strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-9)
