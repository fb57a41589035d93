"""Gradients in shards equal the gradient of the whole batch, on however many threads."""

from __future__ import annotations

import functools
import sys
import threading
import types

import numpy as np
import pytest

from tests.conftest import assert_close
from tests.distributed.ranks import run_ranks
from xformer import Rng, Transformer, TransformerConfig, value_and_grad
from xformer.backends import resolve
from xformer.data.pairs import Batch, TokenPairs
from xformer.errors import DataError
from xformer.training.data_parallel import can_split, data_parallel, default_num_workers, split_batch
from xformer.training.loss import translation_loss
from xformer.tree import flatten

NUMPY = resolve("numpy")
CONFIG = TransformerConfig(source_vocab_size=11, target_vocab_size=13, d_model=8, num_heads=2, d_ff=16,
                           num_encoder_layers=1, num_decoder_layers=1, dropout=0.2)  # fmt: skip
LOSS = functools.partial(translation_loss, label_smoothing=0.1)


@pytest.fixture(scope="module")
def batch():
    rng = np.random.default_rng(0)
    lengths = [6, 2, 5, 3, 4, 6, 1]
    pairs = TokenPairs(*([rng.integers(3, 11, n).tolist() for n in some] for some in (lengths, lengths[::-1])))
    return Batch.make(pairs, range(len(lengths)), xp=NUMPY)


@pytest.fixture(scope="module")
def model():
    return Transformer(CONFIG, xp="numpy", seed=1, dtype="float64")


def test_shards_add_up_to_the_batch(model, batch):
    value, grads = value_and_grad(LOSS)(model, batch, None)
    for workers in (1, 2, 3, 20):
        sharded_value, sharded = data_parallel(workers)(LOSS)(model, batch, None)
        assert float(sharded_value) == pytest.approx(float(value), rel=1e-12)
        assert type(sharded) is Transformer
        for one, other in zip(flatten(sharded)[0], flatten(grads)[0], strict=True):
            assert_close(one, other, tolerance=1e-12)


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_ranks_add_up_to_the_batch(model, batch, size):
    value, grads = value_and_grad(LOSS)(model, batch, None)
    for actual_value, actual in run_ranks(size, lambda ranks: data_parallel(8, communicator=ranks)(LOSS)(model, batch)):
        assert float(actual_value) == pytest.approx(float(value), rel=1e-12)
        for one, other in zip(flatten(actual)[0], flatten(grads)[0], strict=True):
            assert_close(one, other, tolerance=1e-12)


def test_the_bits_do_not_depend_on_the_number_of_threads(model, batch, monkeypatch):
    shards, rngs = batch.split(3), Rng(4).split(3)
    parts = [value_and_grad(LOSS)(model, shard, rng) for shard, rng in zip(shards, rngs, strict=True)]
    value = (parts[0][0] + parts[1][0]) + parts[2][0]
    columns = list(zip(*(flatten(grads)[0] for _, grads in parts), strict=True))
    for threads in ("1", "2", "3"):
        monkeypatch.setenv("XFORMER_NUM_THREADS", threads)
        sharded_value, sharded = data_parallel(3)(LOSS)(model, batch, Rng(4))
        assert float(sharded_value) == float(value)
        for leaf, (first, second, third) in zip(flatten(sharded)[0], columns, strict=True):
            np.testing.assert_array_equal(leaf, (first + second) + third)


def test_an_error_in_a_shard_is_raised_and_the_next_call_works(model, batch):
    wrong = batch._replace(target=np.full_like(batch.target, 99))
    with pytest.raises(DataError, match=r"^target ids range from 99 to 99"):
        data_parallel(3)(LOSS)(model, wrong, None)
    assert np.isfinite(float(data_parallel(3)(LOSS)(model, batch, None)[0]))


def test_threads_run_in_parallel(model, batch, monkeypatch):
    monkeypatch.setenv("XFORMER_NUM_THREADS", "2")
    barrier = threading.Barrier(2, timeout=30)

    def loss(model, shard, rng):
        barrier.wait()  # passes only when both run at once
        return translation_loss(model, shard)

    data_parallel(2)(loss)(model, batch, None)


def test_batches_of_the_user_are_split_by_their_own_method(batch):
    class Mine:
        def split(self, count):
            return ["a", "b"][:count]

    assert list(split_batch(Mine(), 2)) == ["a", "b"]
    tuples = (np.ones(3), np.ones(3))
    assert split_batch(tuples, 2) == [tuples]
    assert can_split(batch)
    assert not can_split(np.ones(3))


def test_the_arrays_of_torch_have_another_split():
    torch = pytest.importorskip("torch")
    assert not can_split(torch.ones(3))


def test_sharding_is_for_numpy(xp, monkeypatch):
    model = Transformer(CONFIG, xp=xp, seed=0)
    monkeypatch.setattr(sys.modules[default_num_workers.__module__], "num_threads", lambda: 4)
    assert default_num_workers(model) == (4 if xp is NUMPY else 1)
    for size, expected in ((1, 8), (2, 8), (4, 8), (8, 8), (3, 9), (16, 16)):
        ranks = types.SimpleNamespace(size=size)
        assert default_num_workers(model, ranks) == (expected if xp is NUMPY else size)
    monkeypatch.setenv("XFORMER_REPRODUCIBLE", "1")
    assert default_num_workers(model) == (8 if xp is NUMPY else 1)
