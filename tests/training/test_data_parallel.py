"""Gradients in shards equal the gradient of the whole, wherever the shards are worked on."""

from __future__ import annotations

import functools
import threading

import numpy as np
import pytest

from tests.conftest import assert_close
from xformer import Rng, Transformer, TransformerConfig, value_and_grad
from xformer.backends import resolve
from xformer.data.pairs import Batch, TokenPairs, split_rows
from xformer.errors import DataError
from xformer.shared_memory import can_share_memory
from xformer.training.data_parallel import ShardedGradient, shards_for
from xformer.training.loss import translation_loss
from xformer.tree import flatten

NUMPY = resolve("numpy")
CONFIG = TransformerConfig(source_vocab_size=11, target_vocab_size=13, d_model=8, num_heads=2, d_ff=16,
                           num_encoder_layers=1, num_decoder_layers=1, dropout=0.2)  # fmt: skip
needs_processes = pytest.mark.skipif(not can_share_memory(), reason="the system cannot share anonymous memory")
PLACES = [
    pytest.param({"workers": 1}, id="one after the other"),
    pytest.param({"workers": 3}, id="threads"),
    pytest.param({"workers": 2}, id="two threads"),
    pytest.param({"workers": 3, "processes": True}, id="processes", marks=needs_processes),
    pytest.param({"workers": 2, "processes": True}, id="two processes", marks=needs_processes),
]


def make_pairs():
    rng = np.random.default_rng(0)
    lengths = [6, 2, 5, 3, 4, 6, 1]
    return TokenPairs(*([rng.integers(3, 11, n).tolist() for n in some] for some in (lengths, lengths[::-1])))


def make_shards(parts):
    pairs = make_pairs()
    return [Batch.make(pairs, rows, xp=NUMPY) for rows in split_rows(range(len(pairs)), parts)]


@pytest.fixture(scope="module")
def model():
    return Transformer(CONFIG, xp="numpy", seed=1, dtype="float64")


@pytest.fixture(params=PLACES, scope="module")
def sharded(request):
    gradient = ShardedGradient(functools.partial(translation_loss, label_smoothing=0.1), **request.param)
    yield gradient
    gradient.close()


def test_shards_add_up_to_the_whole(model, sharded):
    (whole,) = make_shards(1)
    loss = functools.partial(translation_loss, label_smoothing=0.1)
    value, gradients = value_and_grad(loss)(model, whole, None)
    for parts in (1, 2, 3):
        got_value, got = sharded(model, make_shards(parts), [None] * parts)
        assert abs(float(got_value) - float(value)) < 1e-12 * float(value)
        assert type(got) is Transformer
        for mine, wanted in zip(flatten(got)[0], flatten(gradients)[0], strict=True):
            assert_close(mine, wanted, tolerance=1e-12)


def test_the_same_bits_every_time_and_everywhere(model, sharded):
    shards, rngs = make_shards(3), Rng(4).split(3)
    differentiate = value_and_grad(functools.partial(translation_loss, label_smoothing=0.1))
    parts = [differentiate(model, shard, rng) for shard, rng in zip(shards, rngs, strict=True)]
    value = (parts[0][0] + parts[1][0]) + parts[2][0]
    columns = list(zip(*(flatten(gradients)[0] for _, gradients in parts), strict=True))
    for _ in range(3):
        got_value, got = sharded(model, shards, rngs)
        assert float(got_value) == float(value)
        for mine, (first, second, third) in zip(flatten(got)[0], columns, strict=True):
            np.testing.assert_array_equal(mine, (first + second) + third)


def test_every_call_sees_the_parameters_of_its_model(model, sharded):
    shards = make_shards(3)
    for seed in (2, 3):
        other = Transformer(CONFIG, xp="numpy", seed=seed, dtype="float64")
        value, _ = sharded(other, shards, [None] * 3)
        wanted = sum(float(translation_loss(other, shard, label_smoothing=0.1)) for shard in shards)
        assert abs(float(value) - wanted) < 1e-9
    narrow = Transformer(CONFIG, xp="numpy", seed=2, dtype="float32")
    value, gradients = sharded(narrow, shards, [None] * 3)
    assert flatten(gradients)[0][0].dtype == np.float32
    assert np.isfinite(float(value))


def test_gradients_belong_to_the_caller(model, sharded):
    shards = make_shards(2)
    _, first = sharded(model, shards, [None] * 2)
    before = [leaf.copy() for leaf in flatten(first)[0]]
    sharded(model, shards[::-1], Rng(5).split(2))
    for leaf, copy in zip(flatten(first)[0], before, strict=True):
        np.testing.assert_array_equal(leaf, copy)


@pytest.mark.parametrize("bad", [0, 1])
def test_an_error_in_a_shard_is_raised_and_the_next_call_works(model, sharded, bad):
    shards = make_shards(3)
    value, _ = sharded(model, shards, [None] * 3)
    wrong = list(shards)
    wrong[bad] = shards[bad]._replace(target=np.full_like(shards[bad].target, 99))
    with pytest.raises(DataError, match=r"^target ids range from 99 to 99"):
        sharded(model, wrong, [None] * 3)
    assert float(sharded(model, shards, [None] * 3)[0]) == float(value)


@pytest.mark.parametrize("place", PLACES)
def test_no_more_shards_at_a_time_than_workers(model, monkeypatch, place):
    taken = []
    at_once = ShardedGradient._at_once
    monkeypatch.setattr(ShardedGradient, "_at_once", lambda *args: taken.append(len(args[2])) or at_once(*args))
    gradient = ShardedGradient(translation_loss, **place)
    gradient(model, make_shards(5), [None] * 5)
    gradient.close()
    assert taken == {1: [1] * 5, 2: [2, 2, 1], 3: [3, 2]}[place["workers"]]


def test_threads_work_side_by_side(model, monkeypatch):
    monkeypatch.setenv("XFORMER_NUM_THREADS", "2")
    barrier = threading.Barrier(2, timeout=30)

    def loss(model, shard, rng):
        barrier.wait()  # passes only when both run at once
        return translation_loss(model, shard)

    ShardedGradient(loss, 2)(model, make_shards(2), [None] * 2)


def test_shards_are_for_numpy(xp):
    model = Transformer(CONFIG, xp=xp, seed=0)
    assert shards_for(model, 4) == (4 if xp is NUMPY else 1)


@pytest.mark.parametrize("workers", [1, 2])
def test_every_library_adds_up_shards(xp, workers):
    """Processes are for NumPy; the others get threads."""
    model = Transformer(CONFIG, xp=xp, seed=0)
    batch = Batch.make(make_pairs(), [0, 1], xp=xp)
    gradient = ShardedGradient(translation_loss, workers, processes=True)
    value, gradients = gradient(model, [batch, batch], [None] * 2)
    gradient.close()
    assert abs(float(value) - 2.0 * float(translation_loss(model, batch))) < 1e-4
    assert type(gradients) is Transformer
