from __future__ import annotations

import io
import os
import sys

import pytest

from xformer.cli import streams
from xformer.errors import DataError


@pytest.fixture
def pipe(monkeypatch):
    """A pipe in place of standard input: returns the end to write to."""
    reading, writing = os.pipe()
    with open(reading, "rb") as source, open(writing, "wb", buffering=0) as sink:
        monkeypatch.setattr(sys, "stdin", source)
        yield sink


def test_a_pipe_is_a_stream_and_a_file_is_not(pipe, tmp_path, monkeypatch):
    assert streams.is_stream("-")
    assert not streams.is_stream("some file")
    (tmp_path / "text").write_text("one\n")
    with (tmp_path / "text").open("rb") as file:
        monkeypatch.setattr(sys, "stdin", file)
        assert not streams.is_stream("-")


def test_what_is_there_makes_a_chunk(pipe):
    chunks = streams.chunks("-")
    pipe.write(b"one\ntwo\nthr")
    assert next(chunks) == ["one", "two"]
    pipe.write(b"ee\n")
    assert next(chunks) == ["three"]
    pipe.write(b"\nlast")
    pipe.close()
    assert next(chunks) == ["", "last"]
    assert list(chunks) == []


def test_chunks_have_a_largest_size(pipe, monkeypatch):
    monkeypatch.setattr(streams, "_CHUNK_LINES", 2)
    pipe.write(b"a\nb\nc\nd\ne\n")
    pipe.close()
    assert list(streams.chunks("-")) == [["a", "b"], ["c", "d"], ["e"]]


def test_a_file_in_chunks(tmp_path, monkeypatch):
    monkeypatch.setattr(streams, "_CHUNK_LINES", 2)
    (tmp_path / "text").write_text("a\nb\nc\n")
    assert list(streams.chunks(str(tmp_path / "text"))) == [["a", "b"], ["c"]]


def test_an_empty_pipe(pipe):
    pipe.close()
    assert list(streams.chunks("-")) == []


def test_what_came_before_a_bad_line_comes_first(pipe):
    pipe.write(b"one\n\xff\nthree\n")
    pipe.close()
    chunks = streams.chunks("-")
    assert next(chunks) == ["one"]
    with pytest.raises(DataError, match="standard input is not valid UTF-8: line 2"):
        next(chunks)


def test_lines_keep_their_numbers_and_marks_over_chunks(pipe):
    chunks = streams.chunks("-")
    pipe.write(b"\xef\xbb\xbfone\r\n")
    assert next(chunks) == ["one"]
    pipe.write(b"\xef\xbb\xbftwo\n\xff\n")
    assert next(chunks) == ["\ufefftwo"]
    with pytest.raises(DataError, match="line 3"):
        next(chunks)


@pytest.mark.parametrize(("size", "expected"), [(2, [b"on", b"e\n", b"tw", b"o"]), (9, [b"one\n", b"two"])])
def test_readline_keeps_to_its_size(pipe, size, expected):
    pipe.write(b"one\ntwo")
    pipe.close()
    lines = streams.ArrivingLines(sys.stdin.fileno())
    assert [lines.readline(size) for _ in expected] == expected
    assert lines.readline(size) == b""
    assert not lines.ready()


def test_output_to_a_pipe_goes_through(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    with streams.open_output(str(tmp_path / "pipe")) as write:
        write(["one", "zwölf"])
        assert os.read(reader, 100) == "one\nzwölf\n".encode()
    os.close(reader)


def test_an_output_file_appears_when_it_is_whole(tmp_path):
    with streams.open_output(str(tmp_path / "out")) as write:
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
    "read", [streams.read_all, streams.is_stream, streams.is_terminal, lambda name: list(streams.chunks(name))]
)
def test_standard_input_that_is_closed(monkeypatch, stream, read):
    monkeypatch.setattr(sys, "stdin", stream)
    with pytest.raises(DataError, match=r"^standard input is closed; expected text, one sentence a line; pipe it in"):
        read("-")


def test_a_file_needs_no_standard_input(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "stdin", None)
    (tmp_path / "text").write_text("one\n")
    name = str(tmp_path / "text")
    assert streams.read_all(name) == ["one"]
    assert list(streams.chunks(name)) == [["one"]]
    assert not streams.is_stream(name)
    assert not streams.is_terminal(name)


def test_standard_input_that_cannot_be_read(monkeypatch, tmp_path):
    message = "^cannot read standard input: .+; expected text, one sentence a line; pipe it in, or name a file$"
    with (tmp_path / "out").open("wb") as sink:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(sink))
        with pytest.raises(DataError, match=message):
            streams.read_all("-")
        with pytest.raises(DataError, match=message):
            streams.ArrivingLines(sink.fileno()).readline(9)
        sys.stdin.detach()


def test_only_a_terminal_is_one(pipe, monkeypatch):
    assert not streams.is_terminal("-")
    leader, terminal = os.openpty()
    with open(leader, "rb", buffering=0), open(terminal, "rb", buffering=0) as stream:
        monkeypatch.setattr(sys, "stdin", stream)
        assert streams.is_terminal("-")
        assert not streams.is_terminal("text")
