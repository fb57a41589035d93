"""The functions of `scipy.special` for the arrays of every library."""

from __future__ import annotations

import importlib
from typing import Any

from xformer.backends.arrays import device

_PACKAGES = {"numpy": "scipy", "torch": "torch", "jax": "jax.scipy", "cupy": "cupyx.scipy"}


def special_function(library: Any, name: str) -> Any:
    """Return the function of a library with this name, or that of SciPy, which computes on the host."""
    package = _PACKAGES.get(library.name)
    own = getattr(importlib.import_module(f"{package}.special"), name, None) if package else None
    if own is not None:
        return own
    function = getattr(importlib.import_module("scipy.special"), name)

    def on_host(*args: Any) -> Any:
        place = device(next(x for x in args if hasattr(x, "shape")))
        values = (library.to_host(x) if hasattr(x, "shape") else x for x in args)
        return library.from_host(function(*values), device=place)

    return on_host
