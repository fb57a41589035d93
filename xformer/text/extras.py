"""Optional packages, imported only where they are used."""

from __future__ import annotations

import importlib
from types import ModuleType

from xformer.errors import BackendError


def require(package: str, extra: str = "cli") -> ModuleType:
    """Import an optional package, or say which extra of xformer brings it.

    Raises BackendError when the package is absent or cannot be loaded.
    """
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise BackendError(
            f"the package {package!r} cannot be imported ({error}); install it with: pip install 'xformer[{extra}]'"
        ) from error
