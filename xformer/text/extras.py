"""Optional packages, imported on first use."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from xformer.errors import BackendError, CheckpointError, XformerError, how_to_install


def require(package: str) -> ModuleType:
    """Import an optional package or one of its modules.

    Args:
        package: Name to import.

    Raises:
        BackendError: If the package is missing or cannot be loaded, with the command that installs it.
    """
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise BackendError(
            f"the package {package!r} cannot be imported ({error}); {how_to_install(package)}"
        ) from error


@contextlib.contextmanager
def library_errors(message: str) -> Iterator[None]:
    """Turn errors of the library inside the block, and panics of its Rust code, into CheckpointError.

    Args:
        message: Start of the error; the reason follows in parentheses.
    """
    try:
        yield
    except BaseException as error:
        is_panic = type(error).__name__ == "PanicException"  # derives from BaseException
        if isinstance(error, XformerError) or not (is_panic or isinstance(error, Exception)):
            raise
        reason = " ".join(str(error).split())[:300]
        raise CheckpointError(f"{message} ({reason})") from error


def new_figure(width: float, height: float) -> Any:
    """Return a matplotlib figure that needs no display, whichever backend of matplotlib is configured.

    Args:
        width: Width in inches.
        height: Height in inches.

    Raises:
        BackendError: If matplotlib is not installed.
    """
    require("matplotlib")
    figure = require("matplotlib.figure").Figure(figsize=(width, height), layout="constrained")
    require("matplotlib.backends.backend_agg").FigureCanvasAgg(figure)
    return figure
