import io
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from xformer.errors import DataError
from xformer.text.corpus import (
    ParallelCorpus,
    ParallelFiles,
    TextPart,
    digest_of,
    iter_lines,
    line_chunks,
    one_line,
    read_lines,
    read_parallel,
    read_text,
)

# Every character but the line end that may stand in a line, with those that str.splitlines would split at.
line_text = st.text(
    st.one_of(st.characters(exclude_categories=["Cs"]), st.sampled_from("\v\f\x1c\x1d\x1e\x85\u2028\u2029"))
)
lines_text = st.lists(line_text.map(lambda line: line.replace("\n", "").rstrip("\r")), min_size=1, max_size=6)


@pytest.fixture
def write(tmp_path):
    def write_file(name, content):
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return write_file


# --- Lines ---------------------------------------------------------------------------------------


def test_line_ends_and_byte_order_mark(write):
    for content in ("a b\nc\n", "a b\nc", "a b\r\nc\r\n", "\ufeffa b\nc\n", "\ufeffa b\r\nc"):
        assert read_lines(write("file", content)) == ["a b", "c"]
    assert read_lines(write("file", "a\n\n\ufeffb\n")) == ["a", "", "\ufeffb"]


def test_only_newline_ends_a_line(write):
    line = "a\u2028b\u2029c\x85d\x0be\x0cf\x1cg\xa0h\ri"
    assert read_lines(write("file", f"{line}\nnext\n")) == [line, "next"]


@given(st.text(st.sampled_from("ab \n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029")))
def test_one_line_has_no_line_end(text):
    assert len(one_line(text).splitlines()) == min(1, len(one_line(text)))
    assert one_line(text).split() == text.split()


@given(lines_text, st.sampled_from(["\n", "\r\n"]), st.booleans())
def test_written_lines_are_read(lines, end, mark):
    content = ("\ufeff" if mark else "") + "".join(line + end for line in lines)
    first, *rest = lines
    # A line that begins with the mark itself loses it, as any file that begins so.
    expected = [first if mark else first.removeprefix("\ufeff"), *rest]
    assert list(iter_lines(io.BytesIO(content.encode()), "text")) == expected


def test_iter_lines_reads_no_further_than_the_line_it_gives():
    file = io.BytesIO(b"first\nsecond\nthird\n")
    lines = iter_lines(file, "<stdin>")
    assert next(lines) == "first"
    assert file.tell() == len(b"first\n")
    assert next(lines) == "second"
    assert file.tell() == len(b"first\nsecond\n")


def test_empty_file(write):
    for content in ("", "\ufeff"):
        path = write("file", content)
        with pytest.raises(DataError, match=f"^{path} is empty; expected UTF-8 text, one sentence per line$"):
            read_lines(path)


@pytest.mark.parametrize(
    ("content", "line", "position"),
    [
        (b"\xe9t\xe9\n", 1, "byte 1 is 0xe9"),
        (b"ok\nok\nna\xefve\nok\n", 3, "byte 3 is 0xef"),
        (b"ok\n\xc3", 2, "byte 1 is 0xc3"),
        (b"ok\r\n\xed\xa0\x80\n", 2, "byte 1 is 0xed"),  # a lone surrogate
    ],
)
def test_invalid_utf8_names_the_line(write, content, line, position):
    path = write("file", content)
    with pytest.raises(DataError, match=rf"^{path} is not valid UTF-8: line {line}, {position} .*iconv") as caught:
        read_lines(path)
    assert "\n" not in str(caught.value)


def test_compressed_and_utf16_files_are_named(write):
    with pytest.raises(DataError, match="gzip-compressed; expected UTF-8 text; unpack it first"):
        read_lines(write("file.gz", b"\x1f\x8b\x08\x00rest"))
    for encoding in ("utf-16-le", "utf-16-be"):
        with pytest.raises(DataError, match="is UTF-16; expected UTF-8; convert it with: iconv -f UTF-16"):
            read_lines(write("file16", "\ufeffzwei\n".encode(encoding)))


@pytest.mark.parametrize("character", ["a", "🙂"])
def test_longest_line(write, character):
    path = write("file", f"\ufeff{character * 20}\r\n{character * 20}\n")
    assert read_lines(path, max_characters=20) == [character * 20] * 2
    for content in (f"ok\n{character * 21}\nok\n", f"ok\n{character * 1000}"):
        with pytest.raises(DataError, match=r"line 2 has more than 20 characters; .* split the line"):
            read_lines(write("file", content), max_characters=20)


def test_a_file_without_line_ends_is_not_read_completely():
    file = io.BytesIO(b"a" * 1_000_000)
    with pytest.raises(DataError, match="line 1 has more than 1000 characters"):
        next(iter_lines(file, "endless", max_characters=1000))
    assert file.tell() < 10_000


# --- Pairs ---------------------------------------------------------------------------------------


def test_read_parallel(write):
    corpus = read_parallel(write("de", "eins\r\nzwei\r\n"), write("en", "one\ntwo\n"))
    assert (corpus.source, corpus.target) == (["eins", "zwei"], ["one", "two"])
    assert (corpus.num_dropped, list(corpus.line_numbers), len(corpus)) == (0, [1, 2], 2)


def test_different_line_counts(write):
    source, target = write("de", "eins\nzwei\n"), write("en", "one\ntwo\n\n")
    with pytest.raises(DataError, match=f"^{source} has 2 lines and {target} has 3; expected the same number: line n"):
        read_parallel(source, target)


def test_blank_sides_are_dropped_and_counted(write):
    corpus = read_parallel(write("de", "eins\n\ndrei\n\u3000\nfünf\n"), write("en", "one\ntwo\n \t\n\nfive\n"))
    assert (corpus.source, corpus.target) == (["eins", "fünf"], ["one", "five"])
    assert (corpus.num_dropped, list(corpus.line_numbers)) == (3, [1, 5])


def test_columns_of_different_length():
    with pytest.raises(DataError, match="source has 2 lines and target 1; expected one target for each source"):
        ParallelCorpus(["a", "b"], ["c"])
    with pytest.raises(DataError, match="got 1 line numbers for 2 pairs"):
        ParallelCorpus(["a", "b"], ["c", "d"], line_numbers=[1])


def test_select_keeps_line_numbers_and_counts():
    corpus = ParallelCorpus(list("abcd"), list("ABCD"))
    half = corpus.select([1, 3])
    assert half == ParallelCorpus(["b", "d"], ["B", "D"], num_dropped=2, line_numbers=[2, 4])
    assert half.select([1]) == ParallelCorpus(["d"], ["D"], num_dropped=3, line_numbers=[4])


# --- Several files -------------------------------------------------------------------------------


def test_pairs_of_files_are_read_in_chunks(write, monkeypatch):
    monkeypatch.setattr("xformer.text.corpus._CHUNK_LINES", 2)
    source, target = write("1.en", "a\n\nb\nc\n"), write("1.de", "A\nX\n\nC")
    others = write("2.en", "d"), write("2.de", "D\n")
    files = ParallelFiles([source, others[0]], [target, others[1]])
    chunks = list(files)
    assert [chunk.source for chunk in chunks] == [["a"], ["c"], ["d"]]
    assert [list(chunk.line_numbers) for chunk in chunks] == [[1], [4], [1]]
    assert [chunk.num_dropped for chunk in chunks] == [1, 1, 0]
    assert (list(files.source), list(files.target)) == (["a", "c", "d"], ["A", "C", "D"])
    first, second = files.split(np.array([False, True, False]))
    assert (list(first.source), list(second.target)) == (["a", "d"], ["C"])
    with pytest.raises(DataError, match="got 1 source and 0 target files"):
        ParallelFiles([source], [])
    with pytest.raises(DataError, match=r"1.en has 4 lines and .*2.de has 1; expected the same number"):
        list(ParallelFiles([source], [others[1]]))


@given(st.text(alphabet="ab \n", min_size=1).filter(str.strip), st.integers(1, 9), st.floats(0.1, 0.9))
def test_the_pieces_of_a_text_are_the_text(text, size, share):
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "text"
        path.write_text(text)
        whole = TextPart([path], size=size)
        pieces = list(whole)
        assert ("".join(pieces), len(whole)) == (text, len(text))
        assert all(piece.startswith(" ") for piece in pieces[1:])
        first, second = whole.split(share)
        assert "".join(first) + "".join(second) == text
        assert ("".join(first), len(first)) == (text[: len(first)], max(1, int(len(text) * (1 - share))))


# --- Whole texts ---------------------------------------------------------------------------------


def test_read_text_keeps_lines(write):
    assert read_text(write("text", "\ufeffFirst:\n\n two\u2028\t.\n\n".encode())) == "First:\n\n two\u2028\t.\n\n"
    assert read_text(write("text", b"a\r\nb\rc\r\n")) == "a\nb\rc\n"
    assert read_text(write("text", b"x" * 200_000)) == "x" * 200_000


def test_read_text_refuses(write):
    for content, message in (
        (b"", "is empty; expected UTF-8 text"),
        (b" \n\n", "is empty; expected UTF-8 text"),
        (b"a\nb\xff\n", "is not valid UTF-8: line 2, byte 2 is 0xff"),
        (b"\x1f\x8b\x08", "is gzip-compressed"),
        (b"\xff\xfea\x00", "is UTF-16"),
    ):
        path = write("text", content)
        with pytest.raises(DataError, match=f"^{path} {message}"):
            read_text(path)


# --- Large files -----------------------------------------------------------------------------------


# --- Chunks of a large file -------------------------------------------------------------------------------------------

TEXT = "eins\n\nzwei\r\ndrei vier\x85\u2028fünf\n" * 5


@pytest.mark.parametrize("text", [TEXT, TEXT[:-1], "a", "\n", "\ufeffa\nb"])
@pytest.mark.parametrize("chunk_lines", [2, 7, 100])
def test_chunks_have_the_lines_of_the_file(tmp_path, text, chunk_lines):
    path = tmp_path / "text"
    path.write_bytes(text.encode())
    lines, chunks = read_lines(path), line_chunks(path, chunk_lines)
    assert [each.read() for each in chunks] == [lines[i : i + chunk_lines] for i in range(0, len(lines), chunk_lines)]
    assert [each.first_index for each in chunks] == [*range(0, len(lines), chunk_lines)]
    assert sum(each.num_lines for each in chunks) == len(lines)
    assert chunks[-1].stop == path.stat().st_size


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
def test_an_invalid_file_has_no_chunks(tmp_path, content, message):
    if content is not None:
        (tmp_path / "text").write_bytes(content)
    with pytest.raises(DataError, match=message):
        line_chunks(tmp_path / "text", 10)


def test_a_chunk_that_changed_is_refused(tmp_path):
    path = tmp_path / "text"
    path.write_text("one\ntwo\nthree\nfour\n")
    chunks = line_chunks(path, 2)
    path.write_text("one\ntwo\nthree\nFour\n")
    assert chunks[0].read() == ["one", "two"]
    with pytest.raises(DataError, match=r"lines 3 to 4 of .* have changed"):
        chunks[1].read()
    assert digest_of(line_chunks(path, 2)) != digest_of(chunks)
