"""The functions of `scipy.special` for the arrays of every library: its own ones, or those of SciPy on the host."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from types import ModuleType
from typing import Any

from xformer.backends.arrays import device

# Where libraries have them.
_MODULES = {"numpy": "scipy.special", "torch": "torch.special", "jax": "jax.scipy.special", "cupy": "cupyx.scipy.special"}


class _Special(ModuleType):
    def __init__(self, library: Any) -> None:
        super().__init__(f"{library.name}.special")
        self._library, self._module = library, importlib.import_module(_MODULES.get(library.name, "scipy.special"))

    def __getattr__(self, name: str) -> Any:
        own = getattr(self._module, name, None) if self._library.name in _MODULES else None
        function = own or functools.partial(self._on_host, getattr(importlib.import_module("scipy.special"), name))
        setattr(self, name, function)
        return function

    def _on_host(self, function: Any, *args: Any) -> Any:
        xp, arrays = self._library, [x for x in args if hasattr(x, "shape")]
        result = function(*(xp.to_host(x) if hasattr(x, "shape") else x for x in args))
        return xp.from_host(result, device=device(arrays[0]))


@functools.cache
def special_functions(library: Any) -> Any:
    """Return the functions of `scipy.special` for a library.

    Raises:
        AttributeError: If there are none, since SciPy is not installed.
    """
    try:
        return _Special(library)
    except ImportError as error:
        raise AttributeError(f"the functions of scipy.special need SciPy: {error}", name="special") from error
