"""The functions of `scipy.special` for the arrays of every library."""

from __future__ import annotations

import importlib
from typing import Any

from xformer.backends.arrays import device
from xformer.errors import DifferentiationError

_PACKAGES = {"numpy": "scipy", "torch": "torch", "jax": "jax.scipy", "cupy": "cupyx.scipy"}


def special_function(library: Any, name: str) -> Any:
    """Return the function of a library with this name, or that of SciPy, which computes on the host.

    It takes no options of ufuncs, such as `where`.
    """
    package = _PACKAGES.get(library.name)
    own = getattr(importlib.import_module(f"{package}.special"), name, None) if package else None
    function = own or getattr(importlib.import_module("scipy.special"), name)

    def call(*args: Any, **options: Any) -> Any:
        if options:
            raise DifferentiationError(f"special.{name} of a traced array has no argument {next(iter(options))}")
        if own is not None:
            return own(*args)
        place = device(next(x for x in args if hasattr(x, "shape")))
        values = (library.to_host(x) if hasattr(x, "shape") else x for x in args)
        return library.from_host(function(*values), device=place)

    return call
