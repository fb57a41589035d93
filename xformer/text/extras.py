"""Optional packages, imported only where they are used."""

from __future__ import annotations

import importlib
from types import ModuleType

from xformer.errors import BackendError, how_to_install


def require(package: str) -> ModuleType:
    """Import a package that not every use of xformer needs, or one of its modules, or say how to install it.

    Raises BackendError when the package is absent or cannot be loaded.
    """
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise BackendError(
            f"the package {package!r} cannot be imported ({error}); {how_to_install(package)}"
        ) from error
