from __future__ import annotations

import pytest

from xformer.errors import DataError
from xformer.text import read_lines
from xformer.text.line_chunks import LineChunks

TEXT = "eins\n\nzwei\r\ndrei vier\x85\u2028fünf\n" * 5


@pytest.mark.parametrize("text", [TEXT, TEXT[:-1], "a", "\n", "\ufeffa\nb"])
@pytest.mark.parametrize("chunk_lines", [2, 7, 100])
def test_chunks_have_the_lines_of_the_file(tmp_path, text, chunk_lines):
    path = tmp_path / "text"
    path.write_bytes(text.encode())
    lines, chunks = read_lines(path), LineChunks(path, chunk_lines)
    assert [each.read() for each in chunks] == [lines[i : i + chunk_lines] for i in range(0, len(lines), chunk_lines)]
    assert [each.first_index for each in chunks] == [*range(0, len(lines), chunk_lines)]
    assert sum(each.num_lines for each in chunks) == chunks.num_lines == len(lines)
    assert chunks.num_bytes == path.stat().st_size


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"\xef\xbb\xbf", "is empty"),
        (b"one\ntwo\xff\n", "is not valid UTF-8: line 2, byte 4"),
        ("drei fünf".encode()[:-3], "is not valid UTF-8: line 1"),
        (b"\x1f\x8b\x08", "gzip-compressed"),
        ("eins".encode("utf-16"), "is UTF-16"),
        (None, "cannot read"),
    ],
)
def test_an_invalid_file_is_refused(tmp_path, content, message):
    if content is not None:
        (tmp_path / "text").write_bytes(content)
    with pytest.raises(DataError, match=message):
        LineChunks(tmp_path / "text", 10)


def test_a_chunk_that_changed_is_refused(tmp_path):
    path = tmp_path / "text"
    path.write_text("one\ntwo\nthree\nfour\n")
    chunks = LineChunks(path, 2)
    path.write_text("one\ntwo\nthree\nFour\n")
    assert chunks[0].read() == ["one", "two"]
    with pytest.raises(DataError, match=r"lines 3 to 4 of .* have changed"):
        chunks[1].read()
    assert LineChunks(path, 2).digest() != chunks.digest()
