import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.conftest import assert_close
from tests.reference import KINDS, model_of_kind
from xformer import value_and_grad
from xformer.data.pairs import epochs, plan_batches, split_rows
from xformer.data.token_rows import bucket_size
from xformer.errors import DataError
from xformer.random import Rng
from xformer.training import Batch, TokenPairs, translation_loss
from xformer.tree import flatten

sentences = st.lists(st.integers(4, 9), max_size=12)
corpora = st.lists(st.tuples(sentences, sentences), min_size=1, max_size=30).map(
    lambda rows: TokenPairs([source for source, _ in rows], [target for _, target in rows])
)


def test_sides_of_different_lengths_are_refused():
    with pytest.raises(DataError, match="1 source and 2 target sentences"):
        TokenPairs([[4]], [[5], [6]])


def test_a_batch_has_its_ends_and_its_padding(xp):
    pairs = TokenPairs([[4, 5, 6], [7]], [[8], [9, 4]])
    batch = Batch.make(pairs, [1, 0], xp=xp)
    assert_close(batch.source, [[7, 2, 0, 0], [4, 5, 6, 2]], xp=xp, dtype="int64")
    assert_close(batch.target, [[1, 9, 4], [1, 8, 0]], xp=xp, dtype="int64")
    assert_close(batch.labels, [[9, 4, 2], [8, 2, 0]], xp=xp, dtype="int64")
    assert batch.num_tokens == 5


@given(st.integers(0, 5000), st.sampled_from([1, 8]))
def test_bucket_sizes_are_few_and_at_most_an_eighth_larger(size, multiple):
    bucket = bucket_size(size, multiple)
    assert bucket % multiple == 0
    assert size <= bucket <= max(size + multiple - 1, size * 9 / 8)
    assert len({bucket_size(each, multiple) for each in range(size, 2 * size)}) <= 9


@pytest.mark.parametrize("kind", KINDS)
def test_padding_to_buckets_changes_neither_the_loss_nor_gradients(kind):
    model = model_of_kind(kind)
    pairs = TokenPairs([[4 + row % 7] * (1 + row % 4) for row in range(17)], [[3] * (2 + row % 9) for row in range(17)])
    plain = Batch.make(pairs, range(17), xp=np)
    bucketed = Batch.make(pairs, range(17), xp=np, bucketed=True)
    assert (plain.source.shape, plain.target.shape) == ((17, 5), (17, 11))
    assert (bucketed.source.shape, bucketed.target.shape, bucketed.labels.shape) == ((18, 8), (18, 16), (18, 16))
    assert plain.num_tokens == bucketed.num_tokens
    results = [value_and_grad(translation_loss)(model, batch, label_smoothing=0.1) for batch in (plain, bucketed)]
    for one, other in zip(*(flatten(result)[0] for result in results), strict=True):
        assert_close(one, other, tolerance=1e-10)


def test_buckets_end_at_the_last_position():
    for length, expected in ((8, 8), (9, 12), (12, 12), (13, 13)):
        batch = Batch.make(TokenPairs([[4] * (length - 1)], [[5]]), [0], xp=np, bucketed=True, max_positions=12)
        assert batch.source.shape == (1, expected)


@given(corpora, st.integers(1, 60), st.one_of(st.none(), st.integers(0, 5)))
def test_a_plan_holds_every_row_once_and_keeps_to_the_budget(pairs, batch_tokens, seed):
    plan = plan_batches(pairs, batch_tokens, None if seed is None else Rng(seed))
    assert sorted(itertools.chain(*plan)) == list(range(len(pairs)))
    for rows in plan:
        longest = max(max(len(pairs.source[row]), len(pairs.target[row])) + 1 for row in rows)
        assert len(rows) == 1 or longest * len(rows) <= batch_tokens


def test_a_plan_depends_on_its_seed_alone():
    pairs = TokenPairs([[4] * (row % 7) for row in range(50)], [[4] * (row % 5) for row in range(50)])
    assert plan_batches(pairs, 30, Rng(1)) == plan_batches(pairs, 30, Rng(1))
    assert plan_batches(pairs, 30, Rng(1)) != plan_batches(pairs, 30, Rng(2))
    sizes = [
        sum(len(pairs.source[row]) + len(pairs.target[row]) for row in rows) / len(rows)
        for rows in plan_batches(pairs, 30, None)
    ]
    assert sizes == sorted(sizes)


def test_epochs_differ_and_go_on_where_they_were_left():
    pairs = TokenPairs([[4] * (row % 7) for row in range(50)], [[4] * (row % 5) for row in range(50)])
    rng = Rng(3)
    count = len(plan_batches(pairs, 30, rng.fold_in("epoch", 0)))
    first = list(itertools.islice(epochs(pairs, 30, rng), 3 * count))
    assert first[0][0] == 0
    orders = [[rows for epoch, rows in first if epoch == number] for number in (0, 1)]
    assert orders[0] != orders[1]
    assert sorted(itertools.chain(*orders[1])) == list(range(50))
    for skip in (1, count, count + 2):
        assert list(itertools.islice(epochs(pairs, 30, rng, skip=skip), 4)) == first[skip : skip + 4]


def test_no_pairs_make_no_epochs():
    with pytest.raises(DataError, match="no sentence pairs"):
        next(epochs(TokenPairs([], []), 30, Rng(0)))


@given(st.lists(st.integers(), min_size=1, max_size=20), st.integers(-1, 25))
def test_shards_are_neighbours_of_nearly_the_same_size(rows, parts):
    shards = [rows[part] for part in split_rows(len(rows), parts)]
    assert list(itertools.chain(*shards)) == rows
    assert len(shards) == max(1, min(parts, len(rows)))
    assert max(map(len, shards)) - min(map(len, shards)) <= 1
