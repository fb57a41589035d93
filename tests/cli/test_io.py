from __future__ import annotations

import io
import os
import sys

import pytest

from xformer.cli import _io
from xformer.errors import DataError


@pytest.fixture
def pipe(monkeypatch):
    """Replace standard input by a pipe; returns the end to write to."""
    reading, writing = os.pipe()
    with open(reading, encoding="utf-8") as source, open(writing, "wb", buffering=0) as sink:
        monkeypatch.setattr(sys, "stdin", source)
        yield sink


def test_lines_that_have_arrived_make_a_chunk(pipe):
    chunks = _io.read_chunks("-")
    pipe.write(b"one\ntwo\nthr")
    assert next(chunks) == ["one", "two"]
    pipe.write(b"ee\n")
    assert next(chunks) == ["three"]
    pipe.write(b"\nlast")
    pipe.close()
    assert list(chunks) == [[""], ["last"]]


def test_lines_keep_their_numbers_and_marks_over_chunks(pipe):
    chunks = _io.read_chunks("-")
    pipe.write(b"\xef\xbb\xbfone\r\n")
    assert next(chunks) == ["one"]
    pipe.write(b"\xef\xbb\xbftwo\n")
    assert next(chunks) == ["\ufefftwo"]
    pipe.write(b"\xff\n")
    with pytest.raises(DataError, match="line 3"):
        next(chunks)


def test_a_stream_without_line_ends_is_refused_early():
    stream = io.BytesIO(b"x" * 1_000_000)
    with pytest.raises(DataError, match="standard input line 1 has more than 100000 characters"):
        next(_io._read_arriving(stream))
    assert stream.tell() < 500_000
