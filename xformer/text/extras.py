"""Optional packages, imported on first use."""

from __future__ import annotations

import importlib
from types import ModuleType

from xformer.errors import BackendError, how_to_install


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
