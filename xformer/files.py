"""Files that are either the old one or the new one, never half of each."""

from __future__ import annotations

import contextlib
import json
import os
import stat
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from xformer.errors import CheckpointError, ConfigError


def unwritable_parent(path: Path) -> Path | None:
    """The nearest thing above a path that exists, where nothing can be made in it; None where something can."""
    parent = next(parent for parent in path.absolute().parents if parent.exists())
    return None if parent.is_dir() and os.access(parent, os.W_OK) else parent


def check_apart(output: str | os.PathLike[str], kept: Iterable[str | os.PathLike[str] | int], called: str) -> None:
    """Raise ConfigError where an output would replace a file that is read or kept, under whatever name.

    kept: files that need not exist, or descriptors; called: what the error calls the output, such as "--output".
    """
    for file in kept:
        with contextlib.suppress(OSError):
            found = os.stat(file)
            if stat.S_ISREG(found.st_mode) and os.path.samestat(found, os.stat(output)):
                name = "standard input" if isinstance(file, int) else file
                raise ConfigError(
                    f"{called} {output} would replace {name}, which is read or belongs to the run; choose another name"
                )


@contextlib.contextmanager
def atomic_write(path: str | os.PathLike[str]) -> Iterator[IO[bytes]]:
    """Open a binary file that appears at `path` only once everything is written and on disk.

    The bytes go to a temporary file in the same directory, which is flushed, fsynced and renamed over `path`.

    Raises CheckpointError when the disk is full or the place is not writable; what stood at `path` is untouched.
    """
    path = Path(path)
    temporary: str | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        # mkstemp makes the file private; give it the permissions an ordinary open() would.
        umask = os.umask(0)
        os.umask(umask)
        os.fchmod(descriptor, 0o666 & ~umask)
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        temporary = None
        _sync_directory(path.parent)
    except OSError as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(
            f"cannot write {path}: {error.strerror or error}; free space or choose another place "
            "(whatever was saved there before is intact)"
        ) from error
    finally:
        if temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(temporary)


def _sync_directory(directory: Path) -> None:
    """Make the rename itself durable, where the system lets a directory be opened."""
    with contextlib.suppress(OSError):
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def write_json(path: str | os.PathLike[str], value: Any) -> None:
    """Write `value` as indented JSON, atomically."""
    text = json.dumps(value, indent=2, ensure_ascii=False) + "\n"
    with atomic_write(path) as file:
        file.write(text.encode("utf-8"))


def read_json(path: str | os.PathLike[str], what: str) -> dict[str, Any]:
    """Read a JSON object; `what` names it in the error ("run configuration").

    Raises CheckpointError when the file is missing, truncated, or not a JSON object.
    """
    try:
        value = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"cannot read {what} {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise CheckpointError(f"{what} {path} is not valid JSON ({error}); the file is truncated or foreign") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{what} {path} holds a {type(value).__name__}; expected a JSON object")
    return value
