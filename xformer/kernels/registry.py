"""The seam between operations and their fast replacements.

An operation (`ops/`) is defined by portable Array API code. A kernel replaces forward and derivative for one
library, where it says that it supports the arrays; everywhere else the portable code runs.

`XFORMER_KERNELS=portable` switches all kernels off; `XFORMER_CHECK=1` compares the first call of every kernel
with the portable code and raises on a mismatch.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

from xformer.errors import BackendError, ConfigError
from xformer.namespace import Namespace, array_namespace, base_namespace, library, to_host


class Kernel(NamedTuple):
    """A replacement of one operation for one library.

    supports(arrays, static) -> None when it can serve the call, else the reason why not, as a phrase.
    forward(*arrays, save, **static) -> (output, residuals)
    vjp(g, residuals, needs, **static) -> one cotangent for each array; None where the operation has no derivative
    tolerance: the largest relative difference from the portable code that XFORMER_CHECK accepts (float32)
    """

    name: str
    operation: str
    library: str
    supports: Callable[[tuple[Any, ...], dict[str, Any]], str | None]
    forward: Callable[..., tuple[Any, Any]]
    vjp: Callable[..., tuple[Any, ...]] | None
    tolerance: float = 1e-4


_KERNELS: dict[tuple[str, str], list[Kernel]] = {}
_LOADED: set[str] = set()
_LOADING = threading.RLock()
_CHECKED: set[str] = set()


def register(kernel: Kernel) -> None:
    """Add a kernel; of several that support a call, the one registered last serves it."""
    _KERNELS.setdefault((kernel.operation, kernel.library), []).insert(0, kernel)


def find(operation: str, xp: Namespace, arrays: tuple[Any, ...], static: dict[str, Any]) -> Kernel | None:
    """Return the kernel that serves a call on arrays of the library `xp`, or None for the portable code."""
    name = library(xp)
    if name not in _LOADED:
        _load(name)
    for kernel in _KERNELS.get((operation, name), ()):
        if kernel.supports(arrays, static) is None:
            return kernel if _mode() == "auto" else None
    return None


def explain(operation: str, *arrays: Any, **static: Any) -> str:
    """Say, one line a candidate, which path serves `operation` on these arrays, and why the others do not."""
    xp = base_namespace(array_namespace(*arrays))
    if library(xp) not in _LOADED:
        _load(library(xp))
    lines, served = [], False
    for kernel in _KERNELS.get((operation, library(xp)), ()):
        reason = kernel.supports(arrays, static)
        if _mode() == "portable":
            reason = "XFORMER_KERNELS=portable"
        if reason is None and not served:
            served = True
            lines.append(f"{operation} on {library(xp)}: served by {kernel.name}")
        else:
            lines.append(f"{operation} on {library(xp)}: not {kernel.name}: {reason or 'another kernel comes first'}")
    if not served:
        lines.append(f"{operation} on {library(xp)}: served by the portable definition")
    return "\n".join(lines)


def _mode() -> str:
    mode = os.environ.get("XFORMER_KERNELS", "auto")
    if mode not in ("auto", "portable"):
        raise ConfigError(f"XFORMER_KERNELS is {mode!r}; expected 'auto' or 'portable'")
    return mode


def _load(name: str) -> None:
    """Import the kernels of a library the first time one of its arrays is seen; not every library has any."""
    # Threads that see their first array at the same time all wait: a few portable operations would change the bits.
    with _LOADING:
        module = f"xformer.kernels.{name}"
        if name not in _LOADED and importlib.util.find_spec(module) is not None:
            importlib.import_module(module)
        _LOADED.add(name)


def check_wanted(kernel: Kernel) -> bool:
    """Tell whether XFORMER_CHECK asks for a comparison that was not made yet."""
    return os.environ.get("XFORMER_CHECK", "0") == "1" and kernel.name not in _CHECKED


def check(kernel: Kernel, portable: Callable[..., Any], arrays: tuple[Any, ...], static: dict[str, Any]) -> None:
    """Compare a kernel's output with the portable definition's, once.

    Raises BackendError when they differ by more than the kernel's tolerance, or when the kernel made a NaN.
    """
    _CHECKED.add(kernel.name)
    # Some kernels work in place, by agreement with their callers; those get copies.
    copies = [None if array is None else array_namespace(array).asarray(array, copy=True) for array in arrays]
    output = kernel.forward(*copies, save=False, **static)[0]
    expected = portable(*arrays, save=False, **static)[0]
    pairs = zip(output, expected, strict=True) if isinstance(output, tuple) else [(output, expected)]
    for got, wanted in pairs:
        difference = _relative_difference(to_host(got), to_host(wanted))
        if not difference <= kernel.tolerance:
            raise BackendError(
                f"kernel {kernel.name} differs from the portable {kernel.operation} by {difference:.1e} (relative); "
                f"at most {kernel.tolerance:.0e} is accepted; set XFORMER_KERNELS=portable and report it"
            )


def _relative_difference(output: Any, expected: Any) -> float:
    scale = max(float(abs(expected).max(initial=0.0)), 1e-30)
    return float(abs(output - expected).max(initial=0.0)) / scale
