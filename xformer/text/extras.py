"""Optional packages, imported on first use."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from xformer.errors import CheckpointError, MissingPackageError, XformerError, how_to_install
from xformer.io import check_no_lfs_pointer, file_errors

MAX_BYTES = 1 << 30  # far above any tokenizer


def require(package: str) -> ModuleType:
    """Import an optional package or module; raise MissingPackageError, with the way to install it, if it fails."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        problem = f"the package {package!r} cannot be imported ({error})"
        raise MissingPackageError(f"{problem}; {how_to_install(package)}") from error


@contextlib.contextmanager
def library_errors(message: str) -> Iterator[None]:
    """Turn errors of the library inside the block, and panics of its Rust code, into CheckpointError.

    The reason follows the message in parentheses.
    """
    try:
        yield
    except BaseException as error:
        is_panic = type(error).__name__ == "PanicException"  # derives from BaseException
        if isinstance(error, XformerError) or not (is_panic or isinstance(error, Exception)):
            raise
        reason = " ".join(str(error).split())[:300]
        raise CheckpointError(f"{message} ({reason})") from error


def read_bytes(path: Path, description: str = "file of a tokenizer", max_bytes: int = MAX_BYTES) -> bytes:
    """Read a file of a checkpoint; raise CheckpointError if it cannot be read, or is larger than `max_bytes`."""
    with file_errors(f"cannot read {path}"):
        if path.stat().st_size > max_bytes:
            raise CheckpointError(f"{path} has more than {max_bytes >> 20} MiB; expected a {description}")
        check_no_lfs_pointer(path)
        return path.read_bytes()


def new_figure(width: float, height: float) -> Any:
    """Return a matplotlib figure of a size in inches that needs no display, whichever backend is configured."""
    require("matplotlib")
    figure = require("matplotlib.figure").Figure(figsize=(width, height), layout="constrained")
    require("matplotlib.backends.backend_agg").FigureCanvasAgg(figure)
    return figure
