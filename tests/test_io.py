"""A file is the old one or the new one, whatever goes wrong in between."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys

import pytest

from tests.reference import raises_line
from xformer.errors import CheckpointError, ConfigError
from xformer.io import atomic_write, check_no_overwrite, read_json, write_json


def write(path, content):
    with atomic_write(path) as file:
        file.write(content)


def test_the_file_appears_whole_with_ordinary_permissions(tmp_path):
    path = tmp_path / "new" / "folder" / "file.bin"
    with atomic_write(path) as file:
        file.write(b"first, ")
        assert not path.exists()
        file.write(b"second")
    assert path.read_bytes() == b"first, second"
    ordinary = tmp_path / "ordinary"
    ordinary.touch()
    assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE(ordinary.stat().st_mode)


@pytest.mark.parametrize("failing", ["fsync", "replace"])
def test_a_full_disk_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch, failing):
    path = tmp_path / "file.bin"
    write(path, b"old")

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, failing, full)
    with raises_line(CheckpointError, r"cannot write .*file\.bin: No space left on device; free space or choose"):
        write(path, b"new")
    monkeypatch.undo()
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file.bin"]


def test_a_write_that_the_system_cuts_short(tmp_path):
    """A real limit on the size of files, in a process of its own."""
    path = tmp_path / "file.bin"
    write(path, b"old")
    script = """
import resource, sys
from xformer.errors import CheckpointError
from xformer.io import atomic_write
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
try:
    with atomic_write(sys.argv[1]) as file:
        file.write(bytes(100_000))
except CheckpointError as error:
    print(error)
"""
    result = subprocess.run(
        [sys.executable, "-c", script, str(path)],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": ":".join(sys.path)},
    )
    assert "file.bin: File too large; free space or choose another place" in result.stdout
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file.bin"]


def test_a_failure_of_the_writer_leaves_the_old_file(tmp_path):
    path = tmp_path / "file.bin"
    write(path, b"old")

    def interrupted():
        with atomic_write(path) as file:
            file.write(b"half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file.bin"]


def test_places_that_cannot_be_written_to(tmp_path):
    (tmp_path / "file").touch()
    with raises_line(CheckpointError, r"cannot write .*file/child: (Not a directory|File exists)"):
        write(tmp_path / "file" / "child", b"")
    (tmp_path / "folder").mkdir()
    with raises_line(CheckpointError, r"cannot write .*folder: Is a directory"):
        write(tmp_path / "folder", b"")
    assert sorted(os.listdir(tmp_path)) == ["file", "folder"]


def test_json_comes_back(tmp_path):
    value = {"name": "größe", "sizes": [1, 2.5], "none": None}
    write_json(tmp_path / "a.json", value)
    assert read_json(tmp_path / "a.json", "settings") == value
    assert "größe" in (tmp_path / "a.json").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"cannot read settings .*a\.json: No such file or directory"),
        (b"", r"settings .*a\.json is not valid JSON .*truncated or foreign"),
        (b'{"a": 1', r"settings .*a\.json is not valid JSON"),
        (b"\xff\xfe", r"settings .*a\.json is not valid JSON"),
        (b"[1]", r"settings .*a\.json holds a list; expected a JSON object"),
    ],
)
def test_json_that_is_none_is_refused(tmp_path, content, message):
    if content is not None:
        (tmp_path / "a.json").write_bytes(content)
    with raises_line(CheckpointError, message):
        read_json(tmp_path / "a.json", "settings")


def test_an_output_keeps_apart_from_what_is_read(tmp_path):
    (tmp_path / "a").write_text("a")
    (tmp_path / "b").hardlink_to(tmp_path / "a")
    check_no_overwrite(tmp_path / "new", [tmp_path / "a", tmp_path / "new"], "--out")
    check_no_overwrite("/dev/null", ["/dev/null"], "--out")
    with raises_line(ConfigError, "--out .*b would replace .*a, which is read or belongs to the run; choose another"):
        check_no_overwrite(tmp_path / "b", [tmp_path / "new", tmp_path / "a"], "--out")
    with (tmp_path / "a").open() as file, raises_line(ConfigError, "would replace standard input"):
        check_no_overwrite(tmp_path / "a", [file.fileno()], "--out")
