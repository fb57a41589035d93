import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.conftest import assert_close
from xformer.data.chunks import check_text, consecutive_chunks, random_starts
from xformer.errors import ConfigError, DataError
from xformer.random import Rng
from xformer.training import TextChunks

TEXT = np.arange(10, 20)


@pytest.mark.parametrize("text", [TEXT.astype("uint16"), TEXT.tolist()], ids=["uint16", "list"])
def test_chunks_come_with_their_labels(xp, text):
    chunks = TextChunks.make(text, [3, 0], 4, xp=xp)
    assert_close(chunks.tokens, [[13, 14, 15, 16], [10, 11, 12, 13]], xp=xp, dtype="int64")
    assert_close(chunks.labels, [[14, 15, 16, 17], [11, 12, 13, 14]], xp=xp, dtype="int64")
    assert chunks.num_tokens == 8


def test_random_chunks_lie_in_the_text_and_reach_both_ends():
    starts = list(itertools.chain(*itertools.islice(random_starts(TEXT, 4, 7, Rng(0)), 40)))
    assert set(starts) == set(range(6))  # the last window begins at 5: its last label is the last token
    assert TextChunks.make(TEXT, [5], 4, xp=np).labels[0, -1] == TEXT[-1]


def test_a_batch_depends_on_its_number_alone():
    first = list(itertools.islice(random_starts(TEXT, 4, 3, Rng(1)), 9))
    assert len(set(map(tuple, first))) > 5
    assert list(itertools.islice(random_starts(TEXT, 4, 3, Rng(1), skip=5), 4)) == first[5:]
    assert list(itertools.islice(random_starts(TEXT, 4, 3, Rng(2)), 9)) != first


@given(st.integers(2, 50), st.integers(1, 12), st.integers(1, 5))
def test_consecutive_chunks_predict_each_token_once(size, length, batch_size):
    text = np.arange(size)
    batches = [
        TextChunks.make(text, starts, width, xp=np) for starts, width in consecutive_chunks(text, length, batch_size)
    ]
    labels = np.concatenate([batch.labels.reshape(-1) for batch in batches])
    assert labels.tolist() == list(range(1, size))
    assert sum(batch.num_tokens for batch in batches) == size - 1
    assert all(batch.tokens.shape[0] <= batch_size and batch.tokens.shape[1] <= length for batch in batches)


def test_texts_and_settings_that_make_no_chunks():
    with pytest.raises(DataError, match="the training text has 4 tokens; expected at least 5, one more than a chunk"):
        check_text(TEXT[:4], 4, 1, "training")
    with pytest.raises(ConfigError, match="context_length is 0; expected an integer of at least 1"):
        check_text(TEXT, 0, 1, "training")
    with pytest.raises(ConfigError, match="batch_size is 0; expected an integer of at least 1"):
        check_text(TEXT, 4, 0, "training")
