import functools
import math

import numpy as np
import pytest

from tests.conftest import assert_close
from tests.reference import raises_line, without_jax
from xformer.backends import to_host
from xformer.errors import ConfigError, TrainingError
from xformer.models import Transformer, TransformerConfig
from xformer.random import Rng
from xformer.training import SGD, Adafactor, Adam, Batch, TokenPairs, clip_by_global_norm, train_step, translation_loss
from xformer.training.data_parallel import ShardedGradient
from xformer.training.loss import weighted_loss
from xformer.training.step import accumulate, clip_factor
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


mean_loss = functools.partial(weighted_loss, loss=translation_loss)


def step(xp, *batches, max_grad_norm=math.inf, learning_rate=1e-2):
    """One update; each batch is given as the rows of its shards."""
    model = Transformer(CONFIG, xp=xp, seed=0, dtype="float64")
    optimizer = Adam()
    return train_step(
        model,
        optimizer.init(model),
        [[Batch.make(PAIRS, rows, xp=xp) for rows in shards] for shards in batches],
        Rng(0),
        gradient=ShardedGradient(mean_loss, 1),
        optimizer=optimizer,
        learning_rate=learning_rate,
        max_grad_norm=max_grad_norm,
    )


def test_a_step_lowers_the_loss(xp):
    before = step(xp, [[0, 1, 2]])
    batch = Batch.make(PAIRS, [0, 1, 2], xp=xp)
    after = float(translation_loss(before.model, batch)) / batch.num_tokens
    assert after < before.loss
    assert before.state.step == 1


def test_every_library_makes_the_same_step(xp):
    reference, found = step(np, [[0, 1, 2]]), step(xp, [[0, 1, 2]])
    assert found.loss == pytest.approx(reference.loss, rel=1e-10)
    assert found.gradient_norm == pytest.approx(reference.gradient_norm, rel=1e-10)
    for name, array in found.model.named_parameters():
        assert_close(array, dict(reference.model.named_parameters())[name], xp=xp, tolerance=1e-8)


def test_shards_make_the_step_of_the_whole_batch():
    whole, parts = step(np, [[0, 1, 2]]), step(np, [[0], [1], [2]])
    assert parts.loss == pytest.approx(whole.loss, rel=1e-12)
    for one, other in zip(flatten(parts.state.first)[0], flatten(whole.state.first)[0], strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-12)


@without_jax
def test_batches_one_after_the_other_make_the_step_of_the_whole(xp):
    """They have different numbers of tokens, and each token weighs the same."""
    counts = [Batch.make(PAIRS, rows, xp=np).num_tokens for rows in ([0], [1, 2])]
    assert counts == [2, 7]
    whole, parts = step(xp, [[0, 1, 2]]), step(xp, [[0]], [[1], [2]])
    assert parts.loss == pytest.approx(whole.loss, rel=1e-12)
    assert parts.gradient_norm == pytest.approx(whole.gradient_norm, rel=1e-12)
    for one, other in zip(flatten(parts.state.first)[0], flatten(whole.state.first)[0], strict=True):
        assert_close(one, other, tolerance=1e-12)


def test_batches_are_worked_on_one_at_a_time():
    """So that memory is needed for one; and every shard has an Rng of its own."""
    calls = []

    def gradient(model, shards, rngs):
        calls.append((shards, rngs))
        return 1.0, [np.ones(2)]

    batches = [[Batch.make(PAIRS, rows, xp=np) for rows in shards] for shards in ([[0], [1]], [[2]])]
    loss, gradients = accumulate(gradient, None, batches, Rng(3))
    assert (loss, gradients[0].tolist()) == (2.0, [2.0, 2.0])
    assert [[total for _, total in shards] for shards, _ in calls] == [[9, 9], [9]]
    assert [shard for shards, _ in calls for shard, _ in shards] == [shard for shards in batches for shard in shards]
    assert [rng for _, rngs in calls for rng in rngs] == list(Rng(3).split(3))


def test_large_gradients_are_clipped():
    free, clipped = step(np, [[0, 1, 2]]), step(np, [[0, 1, 2]], max_grad_norm=0.01)
    assert clipped.gradient_norm == pytest.approx(free.gradient_norm)
    ratio = 0.01 / free.gradient_norm
    for one, other in zip(flatten(clipped.state.first)[0], flatten(free.state.first)[0], strict=True):
        np.testing.assert_allclose(one, ratio * other, rtol=1e-10, atol=1e-15)


def test_clipping_scales_all_gradients_together(xp):
    gradients = [xp.asarray([3.0, 0.0]), xp.asarray([[4.0]])]
    clipped, norm = clip_by_global_norm(gradients, 1.0)
    assert norm == pytest.approx(5.0)
    assert [to_host(leaf).tolist() for leaf in clipped] == [[pytest.approx(0.6), 0.0], [[pytest.approx(0.8)]]]
    untouched, norm = clip_by_global_norm(gradients, 6.0)
    assert norm == pytest.approx(5.0)
    assert untouched[0] is gradients[0]


BAD = [(math.nan, 1.0), (math.inf, 1.0), (1.0, math.nan), (1.0, math.inf)]


@pytest.mark.parametrize(("loss", "element"), BAD)
@pytest.mark.parametrize("optimizer", [Adam(), SGD(), Adafactor()], ids=["adam", "sgd", "adafactor"])
def test_what_is_not_finite_is_refused_and_changes_nothing(xp, optimizer, loss, element):
    tree = [xp.asarray([[1.0, 2.0]]), xp.asarray([3.0])]
    state = optimizer.init(tree)

    def gradient(model, shards, rngs):
        return xp.asarray(loss), [xp.asarray([[0.0, element]]), xp.asarray([0.0])]

    settings = {"gradient": gradient, "optimizer": optimizer, "learning_rate": 0.1, "max_grad_norm": 1.0}
    batch = Batch.make(PAIRS, [0], xp=xp)
    with pytest.raises(TrainingError, match=f"the loss is {loss} and the gradient norm {abs(element)}; lower"):
        train_step(tree, state, [[batch]], Rng(0), **settings)
    assert [to_host(leaf).tolist() for leaf in tree] == [[[1.0, 2.0]], [3.0]]
    assert all(not to_host(leaf).any() for leaf in flatten(state)[0])


def test_the_factor_clips_and_takes_the_scale_of_the_loss_away(xp):
    for norm, max_grad_norm, wanted in [(4.0, 1.0, 0.25), (4.0, 4.0, 0.5), (4.0, math.inf, 0.5), (0.0, 1.0, 0.5)]:
        assert float(clip_factor(xp.asarray(8.0), xp.asarray(norm), max_grad_norm, 2.0)) == wanted
    for max_grad_norm in (1e-46, 1e35, 1e39, math.inf):  # beyond what float32 holds, once the scale is in it
        for norm in (0.0, 4.0):
            factor = float(clip_factor(xp.asarray(8.0), xp.asarray(norm, dtype=xp.float32), max_grad_norm, 2.0**16))
            assert factor < 1e-30 if norm > max_grad_norm else factor == 2.0**-16
    for loss, norm in BAD:
        assert math.isnan(float(clip_factor(xp.asarray(loss), xp.asarray(norm), math.inf, 1.0)))


def test_a_bad_loss_changes_nothing():
    model = Transformer(CONFIG, xp=np, seed=0, dtype="float64")
    optimizer = Adam()
    state, batch = optimizer.init(model), Batch.make(PAIRS, [0, 1], xp=np)
    before = [leaf.copy() for leaf in flatten(model)[0]]

    def bad(model, shard, rng):
        return mean_loss(model, shard, rng) * math.nan

    make = functools.partial(train_step, optimizer=optimizer, learning_rate=1.0, max_grad_norm=1.0)
    with pytest.raises(TrainingError, match="the loss is nan"):
        make(model, state, [[batch]], Rng(0), gradient=ShardedGradient(bad, 1))
    for one, other in zip(flatten(model)[0], before, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("max_grad_norm", [0.0, -1.0, math.nan])
def test_a_norm_that_cannot_be_is_refused(max_grad_norm):
    with raises_line(ConfigError, f"^max_grad_norm is {max_grad_norm}; expected more than 0"):
        clip_by_global_norm([np.ones(2)], max_grad_norm)
    with raises_line(ConfigError, f"^max_grad_norm is {max_grad_norm}; expected more than 0"):
        step(np, [[0]], max_grad_norm=max_grad_norm)


def test_a_learning_rate_that_is_no_number_is_refused():
    with raises_line(ConfigError, "^learning_rate is nan; expected a finite number"):
        step(np, [[0]], learning_rate=math.nan)
