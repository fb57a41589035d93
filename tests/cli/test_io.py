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


def test_a_pipe_is_a_stream_and_a_file_is_not(pipe, tmp_path, monkeypatch):
    assert _io.is_stream("-")
    assert not _io.is_stream("some file")
    (tmp_path / "text").write_text("one\n")
    with (tmp_path / "text").open("rb") as file:
        monkeypatch.setattr(sys, "stdin", file)
        assert not _io.is_stream("-")


def test_lines_that_have_arrived_make_a_chunk(pipe):
    chunks = _io.read_chunks("-")
    pipe.write(b"one\ntwo\nthr")
    assert next(chunks) == ["one", "two"]
    pipe.write(b"ee\n")
    assert next(chunks) == ["three"]
    pipe.write(b"\nlast")
    pipe.close()
    assert list(chunks) == [[""], ["last"]]


def test_a_file_in_chunks(tmp_path, monkeypatch):
    monkeypatch.setattr(_io, "_LINES_PER_CHUNK", 2)
    (tmp_path / "text").write_text("a\nb\nc\n")
    assert list(_io.read_chunks(str(tmp_path / "text"))) == [["a", "b"], ["c"]]


def test_an_empty_pipe(pipe):
    pipe.close()
    assert list(_io.read_chunks("-")) == []


def test_lines_before_an_invalid_one_come_first(pipe):
    pipe.write(b"one\n\xff\nthree\n")
    pipe.close()
    chunks = _io.read_chunks("-")
    assert next(chunks) == ["one"]
    with pytest.raises(DataError, match="standard input is not valid UTF-8: line 2"):
        next(chunks)


def test_lines_keep_their_numbers_and_marks_over_chunks(pipe):
    chunks = _io.read_chunks("-")
    pipe.write(b"\xef\xbb\xbfone\r\n")
    assert next(chunks) == ["one"]
    pipe.write(b"\xef\xbb\xbftwo\n\xff\n")
    assert next(chunks) == ["\ufefftwo"]
    with pytest.raises(DataError, match="line 3"):
        next(chunks)


def test_a_line_longer_than_a_block_is_read_in_full(pipe, monkeypatch):
    monkeypatch.setattr(_io, "_BLOCK_BYTES", 4)
    pipe.write(b"one hundred\nse")
    chunks = _io.read_chunks("-")
    assert next(chunks) == ["one hundred"]
    pipe.write(b"ven")
    pipe.close()
    assert list(chunks) == [["seven"]]


def test_a_stream_without_line_ends_is_refused_early():
    stream = io.BytesIO(b"x" * 1_000_000)
    with pytest.raises(DataError, match="standard input line 1 has more than 100000 characters"):
        next(_io._read_arriving(stream))
    assert stream.tell() < 500_000


def test_output_to_a_pipe_goes_through(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    with _io.open_output(str(tmp_path / "pipe")) as write:
        write(["one", "zwölf"])
        assert os.read(reader, 100) == "one\nzwölf\n".encode()
    os.close(reader)


def test_an_output_file_appears_when_it_is_complete(tmp_path):
    with _io.open_output(str(tmp_path / "out")) as write:
        write(["one"])
        assert not (tmp_path / "out").exists()
        write(["two"])
    assert (tmp_path / "out").read_bytes() == b"one\ntwo\n"


def closed():
    stream = io.TextIOWrapper(io.BytesIO())
    stream.close()
    return stream


@pytest.mark.parametrize("stream", [None, closed()], ids=["none", "closed"])
@pytest.mark.parametrize(
    "read", [_io.read_all, _io.is_stream, _io.is_terminal, lambda name: list(_io.read_chunks(name))]
)
def test_standard_input_that_is_closed(monkeypatch, stream, read):
    monkeypatch.setattr(sys, "stdin", stream)
    with pytest.raises(DataError, match=r"^standard input is closed; expected text with one sentence per line"):
        read("-")


def test_a_file_needs_no_standard_input(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "stdin", None)
    (tmp_path / "text").write_text("one\n")
    name = str(tmp_path / "text")
    assert _io.read_all(name) == ["one"]
    assert list(_io.read_chunks(name)) == [["one"]]
    assert not _io.is_stream(name)
    assert not _io.is_terminal(name)


def test_standard_input_that_cannot_be_read(monkeypatch, tmp_path):
    message = "^cannot read standard input: .+; expected text, or a file name$"
    with (tmp_path / "out").open("wb") as sink:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(sink))
        with pytest.raises(DataError, match=message):
            _io.read_all("-")
        sys.stdin.detach()


def test_a_terminal_is_recognized(pipe, monkeypatch):
    assert not _io.is_terminal("-")
    leader, terminal = os.openpty()
    with open(leader, "rb", buffering=0), open(terminal, "rb", buffering=0) as stream:
        monkeypatch.setattr(sys, "stdin", stream)
        assert _io.is_terminal("-")
        assert not _io.is_terminal("text")
