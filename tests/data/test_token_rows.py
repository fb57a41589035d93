from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from xformer.data.pairs import TokenPairs, epochs
from xformer.data.token_rows import TokenWriter, row_lengths
from xformer.random import Rng

rows = st.lists(st.lists(st.integers(0, 99), max_size=5), max_size=12)


def store(blocks, vocab_size=100):
    with TokenWriter(vocab_size, Path(tempfile.gettempdir())) as writer:
        for block in blocks:
            writer.write(block)
        return writer.finish()


@given(st.lists(rows, max_size=3))
def test_rows_come_back(blocks):
    stored, expected = store(blocks), [row for block in blocks for row in block]
    assert list(stored) == stored[:] == expected
    assert row_lengths(stored).tolist() == row_lengths(expected).tolist() == [len(row) for row in expected]
    assert [stored[-1 - index] for index in range(len(stored))] == expected[::-1]
    with pytest.raises(IndexError):
        stored[len(expected)]


@pytest.mark.parametrize(("vocab_size", "dtype"), [(1 << 16, np.uint16), ((1 << 16) + 1, np.uint32)])
def test_an_id_takes_as_few_bytes_as_possible(vocab_size, dtype):
    stored = store([[[vocab_size - 1]]], vocab_size)
    assert (stored.ids.dtype, stored[0]) == (dtype, [vocab_size - 1])


def test_files_are_removed_and_the_order_of_training_is_that_of_lists(tmp_path):
    lists = [[[4] * (1 + row * step % 17) for row in range(200)] for step in (3, 5)]
    mapped = []
    for side in lists:
        with TokenWriter(9, tmp_path) as writer:
            writer.write(side)
            mapped.append(writer.finish())
    assert list(tmp_path.iterdir()) == []
    for pairs in zip(*(epochs(TokenPairs(*each), 40, Rng(1)) for each in (lists, mapped)), range(300), strict=False):
        assert pairs[0] == pairs[1]
