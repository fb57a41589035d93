"""Documents in packed rows, and chunks of a text."""

from __future__ import annotations

import numpy as np
import pytest

from tests.conftest import assert_close
from tests.reference import raises_line
from xformer.data.packing import IGNORE_INDEX, Documents, PackedBatch, TextChunks, pack_documents
from xformer.data.token_rows import TokenWriter
from xformer.errors import ConfigError, DataError
from xformer.random import Rng

DOCUMENTS = Documents([[5, 6, 7, 8], [9, 1], [2, 3, 4]], [[0, 0, 1, 1], [1, 1], [1, 0, 1]])


def test_a_batch_by_hand():
    batch = PackedBatch.make(DOCUMENTS, [[0, 1], [2]], 5, xp=np)
    np.testing.assert_array_equal(batch.tokens, [[5, 6, 7, 9, 0], [2, 3, 0, 0, 0]])
    np.testing.assert_array_equal(
        batch.labels, [[IGNORE_INDEX, 7, 8, 1, IGNORE_INDEX], [IGNORE_INDEX, 4, *[IGNORE_INDEX] * 3]]
    )
    np.testing.assert_array_equal(batch.segment_ids, [[1, 1, 1, 2, 0], [1, 1, 0, 0, 0]])
    assert (batch.num_tokens, batch.counts.tolist()) == (4, [3, 1])
    for part, row in zip(batch.split(8), range(2), strict=True):
        for whole, own in zip(batch, part, strict=True):
            np.testing.assert_array_equal(own, whole[row : row + 1])


def test_the_default_is_a_document_a_row_and_all_labels():
    batch = PackedBatch.make(Documents([[5, 6, 7], [9, 1]]), xp=np)
    np.testing.assert_array_equal(batch.labels, [[6, 7], [1, IGNORE_INDEX]])
    np.testing.assert_array_equal(batch.segment_ids, [[1, 1], [1, 0]])


def test_documents_in_memory_maps(tmp_path):
    rows = []
    for lists in (DOCUMENTS.tokens, DOCUMENTS.loss_masks):
        with TokenWriter(10, tmp_path) as writer:
            writer.write(lists)
            rows.append(writer.finish())
    for one, other in zip(
        PackedBatch.make(Documents(*rows), [[2, 0, 1]], xp=np),
        PackedBatch.make(DOCUMENTS, [[2, 0, 1]], xp=np),
        strict=True,
    ):
        np.testing.assert_array_equal(one, other)


def test_rows_are_filled_best_fit_first():
    assert pack_documents([3, 0, 5, 2, 7, 4], 7) == [[4], [2, 3], [5, 0]]
    assert pack_documents([], 3) == []
    rng = Rng(0)
    lengths = rng.generator().integers(1, 60, 500)
    rows = pack_documents(lengths, 64)
    assert sorted(number for row in rows for number in row) == list(range(500))
    assert max(sum(lengths[row]) for row in rows) <= 64
    assert len(rows) <= 1.05 * sum(lengths) / 64 + 1


@pytest.mark.parametrize(("call", "error", "message"), [
    (lambda: Documents([[1, 2]], [[1]]), DataError, "tokens and loss_masks have rows of other lengths"),
    (lambda: Documents([1, 2]), DataError, "documents are not lists of lists .*; expected the token ids of each"),
    (lambda: PackedBatch.make(Documents([[1.5, 2]]), xp=np), DataError, r"tokens is \[1\.5, 2\]; expected a list of"),
    (lambda: pack_documents([3, 9], 8), DataError, "document 1 takes 9 tokens; expected at most 8, the length of"),
    (lambda: pack_documents([3], 0), ConfigError, "length is 0; expected an integer of at least 1"),
    (lambda: PackedBatch.make(DOCUMENTS, [[0, 1]], 3, xp=np), DataError,
     "the longest of 1 rows has 4 tokens; expected at most 3"),
    (lambda: PackedBatch.make(Documents([]), xp=np), DataError, "no document has two tokens; expected at least one"),
    (lambda: PackedBatch.make(DOCUMENTS, [[0], [-1]], xp=np), DataError, "rows has the document -1; expected ind"),
    (lambda: PackedBatch.make(DOCUMENTS, [0, 1], xp=np), DataError, "row 0 is 0; expected a list of integers"),
    (lambda: PackedBatch.make(Documents([[4, 5], [1, 2, 3]], [[1, 1], [-100, -100, 3]]), xp=np), DataError,
     "loss_masks has -100 in document 1; expected 0 or 1"),
    (lambda: PackedBatch.make(Documents([[4, 5]], ["10"]), xp=np), DataError, "loss_masks has '1' in document 0"),
    (lambda: pack_documents([3.7, 2.2], 8), DataError, r"lengths is \[3\.7, 2\.2\]; expected a list of integers"),
])  # fmt: skip
def test_invalid_documents(call, error, message):
    with raises_line(error, message):
        call()


# --- Chunks ---------------------------------------------------------------------------------------------------------

TEXT = np.arange(10, 20)


@pytest.mark.parametrize("text", [TEXT, TEXT.astype("uint16"), TEXT.tolist()], ids=["int64", "uint16", "list"])
def test_chunks_come_with_their_labels(xp, text):
    chunks = TextChunks.make(text, [3, 0], 4, xp=xp)
    assert_close(chunks.tokens, [[13, 14, 15, 16], [10, 11, 12, 13]], xp=xp, dtype="int64")
    assert_close(chunks.labels, [[14, 15, 16, 17], [11, 12, 13, 14]], xp=xp, dtype="int64")
    assert chunks.num_tokens == 8
