"""Functions of the base namespace of a trace: the library's, Python operators, and those that the standard lacks."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

from xformer.backends import backend_of, extra, is_trace
from xformer.tracing.tracer import BINARY_OPERATORS, COMPARISONS, UNARY_OPERATORS

_PYTHON_OPERATORS: dict[str, Callable[..., Any]] = {
    f"operator_{name}": getattr(operator, f"__{name}__") for name in (*BINARY_OPERATORS, *COMPARISONS, *UNARY_OPERATORS)
}


def base_function(base: Any, name: str) -> Any:
    """Return the function called `name` in the base namespace of a trace; an enclosing trace knows all names itself."""
    if is_trace(base):
        return getattr(base, name)
    if name in _PYTHON_OPERATORS:
        return getattr(base, name, _PYTHON_OPERATORS[name])
    if name in extra.NAMES:
        return extra.lookup(base, name)
    if name in _ITEM_FUNCTIONS:
        return functools.partial(_ITEM_FUNCTIONS[name], base)
    return getattr(base, name)


def set_item(xp: Any, x: Any, value: Any, key: Any) -> Any:
    """Return a copy of `x` with `value` at `key`."""
    if is_trace(xp):
        return xp.setitem(x, value, key)
    return backend_of(xp).set_item(xp, x, value, key)


def _get_item(xp: Any, x: Any, key: Any) -> Any:
    return x[key]


def _to_device(xp: Any, x: Any, device: Any, *, stream: Any = None) -> Any:
    from array_api_compat import to_device  # the one place where arrays change device inside a trace

    return to_device(x, device, stream=stream)


_ITEM_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "getitem": _get_item,
    "setitem": set_item,
    "to_device": _to_device,
}
