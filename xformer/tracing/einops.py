"""Traced arrays in einops and opt_einsum, which look for functions by the class of an array."""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable
from typing import Any

from xformer.backends import is_inexact
from xformer.tracing.tracer import Tracer, numpy_functions


def _function(name: str) -> Callable[..., Any]:
    """Return a function of NumPy for traced arrays of any library."""
    return lambda *args, **options: numpy_functions().call_function(name, args, options)


@functools.cache
def register() -> None:
    """Register traced arrays with those packages that are installed and have the private names used here."""
    with contextlib.suppress(Exception):
        dispatch: Any = importlib.import_module("opt_einsum.backends.dispatch")
        dispatch._cached_funcs |= {(name, "xformer"): _function(name) for name in ("einsum", "tensordot", "transpose")}
    methods: dict[str, Any] = {
        "is_appropriate_type": lambda x: type(x) is Tracer,
        "is_float_type": lambda x: is_inexact(x.dtype),
        "reduce": lambda x, operation, axes: _function(operation)(x, tuple(axes)),
        "stack_on_zeroth_dimension": _function("stack"),
        "add_axis": _function("expand_dims"),
        "concat": _function("concatenate"),
        **{name: _function(name) for name in ("einsum", "reshape", "tile", "transpose")},
    }
    attributes = {"framework_name": "xformer", **{name: staticmethod(method) for name, method in methods.items()}}
    with contextlib.suppress(Exception):
        base: Any = importlib.import_module("einops._backends").AbstractBackend
        base.of_traced_arrays = type("Backend", (base,), attributes)  # einops asks for subclasses, and keeps none
