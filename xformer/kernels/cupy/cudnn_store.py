"""Built plans on disk, so that the next process need not build them again.

One file a plan: a line of JSON, which says what it is for and how to tell that it is whole, then the plan as cuDNN
serialized it. A file that is not whole, or not for this, is as good as absent; nothing of it is ever executed as code
of Python.
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

_MOST_FILES = 1024  # of some 80 kB each; those used longest ago go first


def folder() -> Path:
    """Where plans are: xformer/cudnn in the user's cache (XDG_CACHE_HOME, else ~/.cache)."""
    base = env_value("XDG_CACHE_HOME")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "xformer" / "cudnn"


def load(purpose: str) -> tuple[dict[str, int], bytes] | None:
    """The numbers of its ports and the plan saved for a purpose, or None when there is none, or a damaged one."""
    try:
        path = _path(purpose)
        head, _, plan = path.read_bytes().partition(b"\n")
        saved = json.loads(head)
        if saved["purpose"] != purpose or saved["sha256"] != _digest(plan):
            return None
        uids: dict[str, int] = saved["uids"]
    except (OSError, ValueError, KeyError, TypeError, RuntimeError):  # RuntimeError: there is no home
        return None
    with contextlib.suppress(OSError):
        os.utime(path)  # it was of use
    return uids, plan


def save(purpose: str, uids: dict[str, int], plan: bytes) -> None:
    """Write a plan in one piece, and drop the oldest where there are too many; a full disk is no reason to stop."""
    head = {"purpose": purpose, "sha256": _digest(plan), "uids": uids}
    with contextlib.suppress(CheckpointError, OSError, RuntimeError):
        with atomic_write(_path(purpose)) as file:
            file.write(json.dumps(head).encode() + b"\n" + plan)
        dated = sorted((path.stat().st_mtime, path) for path in folder().glob("*.plan"))
        for _, path in dated[:-_MOST_FILES]:
            path.unlink(missing_ok=True)


def _path(purpose: str) -> Path:
    return folder() / f"{_digest(purpose.encode())[:32]}.plan"


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
