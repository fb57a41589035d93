"""Cache of built cuDNN plans on disk.

A file holds one plan: a line of JSON with its key and checksum, then the plan as serialized by cuDNN. A file that is
damaged or has another key is ignored.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from pathlib import Path

from xformer.environment import env_value
from xformer.errors import CheckpointError
from xformer.io import atomic_write

_MAX_FILES = 1024  # of about 80 kB each; the least recently used are deleted


def folder() -> Path:
    """Return xformer/cudnn in the cache directory of the user (XDG_CACHE_HOME, else ~/.cache)."""
    base = env_value("XDG_CACHE_HOME")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "xformer" / "cudnn"


def load(cache_key: str) -> tuple[dict[str, int], bytes] | None:
    """Return the ids of the ports and the plan of a key, or None if there is no valid file."""
    try:
        path = _path(cache_key)
        head, _, plan = path.read_bytes().partition(b"\n")
        saved = json.loads(head)
        if saved["cache_key"] != cache_key or saved["sha256"] != _digest(plan):
            return None
        uids: dict[str, int] = saved["uids"]
    except (OSError, ValueError, KeyError, TypeError, RuntimeError):  # RuntimeError: no home directory
        return None
    with contextlib.suppress(OSError):
        os.utime(path)  # for the order of deletion
    return uids, plan


def save(cache_key: str, uids: dict[str, int], plan: bytes) -> None:
    """Write a plan atomically, and delete the oldest files if there are too many; ignore errors such as a full disk."""
    head = {"cache_key": cache_key, "sha256": _digest(plan), "uids": uids}
    with contextlib.suppress(CheckpointError, OSError, RuntimeError):
        with atomic_write(_path(cache_key)) as file:
            file.write(json.dumps(head).encode() + b"\n" + plan)
        dated = sorted((path.stat().st_mtime, path) for path in folder().glob("*.plan"))
        for _, path in dated[:-_MAX_FILES]:
            path.unlink(missing_ok=True)


def _path(cache_key: str) -> Path:
    return folder() / f"{_digest(cache_key.encode())[:32]}.plan"


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
