"""Sums over ranks have the same bits on every rank, for every number of ranks."""

from __future__ import annotations

import numpy as np
import pytest

from tests.distributed.ranks import run_ranks
from xformer import distributed
from xformer.backends import resolve, to_host
from xformer.distributed import SingleProcess, broadcast, connect, tree_sum
from xformer.errors import ConfigError

SHAPES = [(3, 5), (), (0, 4), (17,), (2, 1, 3)]


def arrays(seed, dtype="float32"):
    rng = np.random.default_rng(seed)
    return [np.asarray(rng.standard_normal(shape) * 10.0 ** rng.integers(-6, 6), dtype=dtype) for shape in SHAPES]


def add(left, right):
    return [one + other for one, other in zip(left, right, strict=True)]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
def test_sums_have_the_order_of_tree_sum(size):
    expected = tree_sum([arrays(rank) for rank in range(size)], add)
    for sums in run_ranks(size, lambda ranks: ranks.all_reduce(arrays(ranks.rank))):
        for one, other in zip(sums, expected, strict=True):
            assert one.shape == other.shape
            np.testing.assert_array_equal(one, other)


def test_one_two_four_and_eight_ranks_add_shards_to_the_same_bits():
    shards = [arrays(number) for number in range(8)]

    def total(ranks):
        own = shards[8 * ranks.rank // ranks.size : 8 * (ranks.rank + 1) // ranks.size]
        return ranks.all_reduce(tree_sum(own, add))

    results = [result for size in (1, 2, 4, 8) for result in run_ranks(size, total)]
    for result in results[1:]:
        for one, other in zip(result, results[0], strict=True):
            np.testing.assert_array_equal(one, other)
    in_order = [sum(column[1:], start=column[0]) for column in zip(*shards, strict=True)]
    assert any((one != other).any() for one, other in zip(results[0], in_order, strict=True))


def test_arrays_of_several_dtypes_in_small_buckets(monkeypatch):
    monkeypatch.setattr(distributed, "_BUCKET_BYTES", 20)

    def mixed(rank):
        return [*arrays(rank), *arrays(rank, "float64"), *arrays(10 + rank)]

    expected = add(mixed(0), mixed(1))
    for sums in run_ranks(2, lambda ranks: ranks.all_reduce(mixed(ranks.rank))):
        for one, other in zip(sums, expected, strict=True):
            assert one.dtype == other.dtype
            np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("name", ["array_api_strict", "torch"])
def test_arrays_of_other_libraries(name):
    pytest.importorskip(name)
    xp = resolve(name)
    expected = add(arrays(0), arrays(1))
    sums = run_ranks(2, lambda ranks: ranks.all_reduce([xp.asarray(array) for array in arrays(ranks.rank)]))
    for one, other in zip(sums[0], expected, strict=True):
        np.testing.assert_array_equal(to_host(one), other)


def test_values_are_gathered_in_the_order_of_the_ranks():
    values = [None, 0.1, {"a": ["ü", 2]}, "x" * 1000]
    for gathered in run_ranks(4, lambda ranks: ranks.all_gather(values[ranks.rank])):
        assert gathered == values


def test_arrays_are_shared_by_their_owners():
    shared = run_ranks(3, lambda ranks: ranks.share([np.full(2, ranks.rank)] * 3, [2, 0, 1]))
    for rank in range(3):
        np.testing.assert_array_equal(np.stack(shared[rank])[:, 0], [2, 0, 1])
    trees = run_ranks(2, lambda ranks: broadcast(ranks, {"a": np.full(2, ranks.rank), "b": "static"}, root=1))
    for tree in trees:
        np.testing.assert_array_equal(tree["a"], [1, 1])


def test_a_single_process_exchanges_nothing():
    alone, given = SingleProcess(), arrays(0)
    assert all(one is other for one, other in zip(alone.all_reduce(given), given, strict=True))
    assert alone.all_gather("a") == ["a"]
    assert connect(None).size == 1


def test_unknown_communicators_are_refused():
    with pytest.raises(ConfigError, match=r"^communicator is 'gloo'; expected 'mpi' or 'nccl'$"):
        connect("gloo")
