"""Training on ranks that are threads: gradients, validation and sharded optimizer states have the same bits."""

from __future__ import annotations

import functools
import importlib

import numpy as np
import pytest

from tests.distributed.ranks import run_ranks
from xformer import Rng, Transformer, TransformerConfig, distributed, value_and_grad
from xformer.backends import resolve
from xformer.data.pairs import Batch, TokenPairs
from xformer.distributed import ShardedOptimizer, SingleProcess
from xformer.errors import ConfigError
from xformer.training.data_parallel import data_parallel
from xformer.training.loss import mean_loss, translation_loss
from xformer.training.optimizers import SGD, Adafactor, Adam, AdamW, Muon
from xformer.tree import flatten

CONFIG = TransformerConfig(source_vocab_size=11, target_vocab_size=13, d_model=8, num_heads=2, d_ff=16,
                           num_encoder_layers=1, num_decoder_layers=1, dropout=0.2)  # fmt: skip
LOSS = functools.partial(translation_loss, label_smoothing=0.1)


@pytest.fixture(scope="module")
def pairs():
    rng = np.random.default_rng(0)
    lengths = [6, 2, 5, 3, 4, 6, 1, 7, 2]
    return TokenPairs(*([rng.integers(3, 11, n).tolist() for n in some] for some in (lengths, lengths[::-1])))


@pytest.fixture(scope="module")
def model():
    return Transformer(CONFIG, xp="numpy", seed=1)


def make_batch(pairs, count):
    return Batch.make(pairs, range(count), xp=resolve("numpy"))


def assert_same_bits(trees):
    first, *others = [[leaf.tobytes() for leaf in flatten(tree)[0]] for tree in trees]
    assert all(other == first for other in others)


@pytest.mark.parametrize("count", [9, 3, 1])
def test_gradients_have_the_same_bits_for_any_number_of_ranks(model, pairs, count):
    batch = make_batch(pairs, count)  # of fewer pairs than shards, too

    def compute(ranks):
        return data_parallel(4, communicator=ranks)(LOSS)(model, batch, Rng(3))

    assert_same_bits([compute(SingleProcess()), *run_ranks(2, compute), *run_ranks(4, compute)])
    value, grads = value_and_grad(LOSS)(model, batch, None)
    for sharded_value, sharded in run_ranks(2, lambda ranks: data_parallel(4, communicator=ranks)(LOSS)(model, batch)):
        assert float(sharded_value) == pytest.approx(float(value), rel=1e-5)
        for one, other in zip(flatten(sharded)[0], flatten(grads)[0], strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


def test_another_order_of_shards_is_noticed(model, pairs, monkeypatch):
    sequential = importlib.import_module("xformer.training.data_parallel")
    monkeypatch.setattr(sequential, "tree_sum", lambda items, add: functools.reduce(add, items))
    with pytest.raises(AssertionError):
        test_gradients_have_the_same_bits_for_any_number_of_ranks(model, pairs, 9)


@pytest.mark.parametrize("count", [9, 1])
def test_sums_during_the_backward_pass_have_the_same_bits(model, pairs, count, monkeypatch):
    monkeypatch.setattr(distributed, "_OVERLAPPED_BYTES", 500)
    batch = make_batch(pairs, count)

    def compute(ranks, overlaps=False):
        ranks.overlaps = overlaps
        return data_parallel(4, communicator=ranks)(LOSS)(model, batch, Rng(3))

    overlapped = [run_ranks(size, lambda ranks: compute(ranks, overlaps=True)) for size in (2, 4)]
    assert_same_bits([compute(SingleProcess()), *overlapped[0], *overlapped[1]])


def test_a_small_batch_is_divided_among_the_ranks(model, pairs):
    batch, sizes = make_batch(pairs, 8), []

    def loss(model, batch, rng):
        sizes.append(batch.source.shape[0])
        return LOSS(model, batch, rng)

    run_ranks(4, lambda ranks: data_parallel(64, communicator=ranks)(loss)(model, batch, Rng(3)))
    assert len(sizes) == 8


def test_different_numbers_of_shards_are_refused(model):
    with pytest.raises(ConfigError, match=r"^data_parallel is \[2, 4\] on the ranks; expected the same number"):
        run_ranks(2, lambda ranks: data_parallel(2 + 2 * ranks.rank, communicator=ranks))


def test_a_rank_may_own_no_parameter():
    parameters = [np.ones(3, np.float32)]

    def compute(ranks):
        optimizer = ShardedOptimizer(Adam(), ranks)
        state = optimizer.init(parameters)
        updated, state = optimizer.update(parameters, parameters, state, 0.1)
        whole = optimizer.gather_state(updated, state)
        again, _ = optimizer.update(updated, parameters, optimizer.shard_state(updated, whole), 0.1)
        return again, whole.step

    expected, state = Adam().update(parameters, parameters, Adam().init(parameters), 0.1)
    expected, _ = Adam().update(expected, parameters, state, 0.1)
    assert_same_bits([expected, *(result for result, _ in run_ranks(2, compute))])


def test_validation_losses_have_the_same_bits(model, pairs):
    batches = [make_batch(pairs, count) for count in (2, 9, 4, 7, 1)]

    def compute(ranks):
        return mean_loss(LOSS, model, batches, 4, communicator=ranks)

    values = {
        mean_loss(LOSS, model, batches, 1),
        *run_ranks(2, compute),
        *run_ranks(4, compute),
        *run_ranks(8, compute),
    }
    assert len(values) == 1


def test_shards_that_cannot_be_divided_are_refused(model, pairs):
    with pytest.raises(ConfigError, match=r"^data_parallel is 3; expected a multiple of the 2 ranks$"):
        run_ranks(2, lambda ranks: data_parallel(3, communicator=ranks))
    whole = [np.zeros(3)]
    with pytest.raises(ConfigError, match=r"^a batch is a list; several ranks expect one with a method split\(n\)$"):
        run_ranks(2, lambda ranks: data_parallel(2, communicator=ranks)(LOSS)(model, whole))


@pytest.mark.parametrize(
    "optimizer",
    [Adam(), AdamW(weight_decay=0.1), Muon(), SGD(momentum=0.0), SGD(), Adafactor()],
    ids=lambda o: type(o).__name__,
)
def test_sharded_optimizer_states_make_the_same_updates(model, pairs, optimizer):
    _, grads = value_and_grad(LOSS)(model, make_batch(pairs, 9), None)

    def update(ranks):
        sharded = ShardedOptimizer(optimizer, ranks)
        state, current = sharded.init(model), model
        sizes = sum(leaf.size for leaf in flatten(state)[0])
        for _ in range(2):
            current, state = sharded.update(current, grads, state, 0.01)
        whole = sharded.gather_state(current, state)
        state = sharded.shard_state(current, whole)
        current, state = sharded.update(current, grads, state, 0.01)
        return (current, sharded.gather_state(current, state)), sizes

    state, current = optimizer.init(model), model
    total = sum(leaf.size for leaf in flatten(state)[0])
    for _ in range(3):
        current, state = optimizer.update(current, grads, state, 0.01)
    results = run_ranks(3, update)
    assert sum(sizes for _, sizes in results) == total
    assert all(sizes < max(1, 0.6 * total) for _, sizes in results)
    assert_same_bits([(current, state), *(trees for trees, _ in results)])
    assert all(type(whole) is type(state) and whole.step == 3 for (_, whole), _ in results)
