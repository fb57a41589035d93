"""Text for training, from files or from memory."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from xformer.errors import CheckpointError, DataError, describe_type
from xformer.families.run_directory import RunDirectory, sha256
from xformer.io import StrPath

# The path of a text file, a list of `pathlib.Path`, or lines of text as an iterable of strings.
Text = StrPath | Iterable[StrPath]

Files = Mapping[str, Path]  # by name: "source", and "source 2" for the second file of a list

_EXPECTED = "the path of a text file, a list of pathlib.Path, or a list of strings, the lines of a text"
_MAX_PATH = 4096


class TextFiles:
    """The files of a run, by name: "source", and "source 2" for the second file of a list.

    Lines in memory are written to files, which a run keeps in data/, so that it can be resumed.

    Args:
        texts: Text by name.
        directory: Directory for lines in memory.
        run: The run that keeps them.

    Raises:
        DataError: If a text is not text, or is empty.
    """

    def __init__(self, texts: Mapping[str, Text], directory: Path, run: RunDirectory) -> None:
        self._directory, self._kept = directory, run.path.absolute() / "data"
        self.paths: dict[str, Path] = {}
        for name, text in texts.items():
            paths = _list_files(name, text) or [_write_lines(name, text, directory)]
            self.paths |= {name if n == 1 else f"{name} {n}": path for n, path in enumerate(paths, start=1)}

    def describe(self) -> dict[str, Any]:
        """Return the path, in a run, and the SHA-256 of each file."""
        described = {}
        for name, path in self.paths.items():
            place = self._kept / path.name if self._is_temporary(path) else path.absolute()
            described[name] = {"path": place.as_posix(), "sha256": file_digest(path)}
        return described

    def keep(self) -> None:
        """Copy the temporary files into the run."""
        for path in filter(self._is_temporary, self.paths.values()):
            self._kept.mkdir(exist_ok=True)
            shutil.copyfile(path, self._kept / path.name)

    def _is_temporary(self, path: Path) -> bool:
        return path.parent == self._directory


def paths_of(files: Files, name: str) -> list[Path]:
    """Return the files of a text."""
    return [path for key, path in files.items() if key.split()[0] == name]


@contextlib.contextmanager
def open_texts(texts: Mapping[str, Text], run: RunDirectory) -> Iterator[TextFiles]:
    """Yield the files of texts; errors name lines in memory by their argument."""
    with tempfile.TemporaryDirectory() as directory:
        try:
            yield TextFiles(texts, Path(directory), run)
        except DataError as error:
            raise DataError(str(error).replace(f"{directory}{os.sep}", "")) from error


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a data file, which must be a regular file, since resuming reads it again."""
    if path.exists() and not path.is_file():
        raise DataError(f"{path} is not a regular file; training reads its data more than once; save it to a file")
    try:
        return sha256(path)
    except CheckpointError as error:
        raise DataError(f"{error}; expected a UTF-8 text file; check the path") from error


def _list_files(name: str, text: Any) -> list[Path]:
    """Return the files that an argument names; none for lines of text."""
    if isinstance(text, str) and (len(text) > _MAX_PATH or "\n" in text):
        raise DataError(f"{name} is a text of {len(text):,} characters; expected {_EXPECTED}; pass [text]")
    if isinstance(text, str | os.PathLike):
        return [Path(text)]
    if isinstance(text, bytes | Mapping) or (not isinstance(text, Iterable) and not hasattr(text, "__getitem__")):
        raise DataError(f"{name} is {describe_type(text)}; expected {_EXPECTED}")
    if isinstance(text, list | tuple) and text:
        if all(isinstance(each, os.PathLike) for each in text):
            return [Path(each) for each in text]
        if isinstance(text[0], str) and os.path.isfile(text[0]):
            raise DataError(f"{name} is a list of strings, which are lines, but {text[0]} is a file; use pathlib.Path")
    return []


def _write_lines(name: str, lines: Any, directory: Path) -> Path:
    """Write lines of text to a file."""
    path, number = directory / name, 0
    with path.open("w", encoding="utf-8", newline="") as file:
        for number, line in enumerate(lines, start=1):
            if not isinstance(line, str):
                raise DataError(f"{name} has {describe_type(line)} at index {number - 1}; expected {_EXPECTED}")
            if "\n" in line[:-1] and "text" not in name:
                received = f"{name} has a line break inside the text at index {number - 1}"
                raise DataError(f"{received}; expected one line each; replace it by a space")
            try:
                file.write(line if line.endswith("\n") else f"{line}\n")
            except UnicodeEncodeError as error:
                raise DataError(f"the text at index {number - 1} of {name} is not valid Unicode ({error})") from error
    if not number:
        raise DataError(f"{name} is empty; expected {_EXPECTED}")
    return path
