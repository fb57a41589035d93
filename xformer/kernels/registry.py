"""The seam between operations and their fast replacements.

An operation (`ops/`) is defined by portable Array API code. A kernel replaces forward and derivative for one
library, where it says that it supports the arrays; everywhere else the portable code runs.

`XFORMER_KERNELS=portable` switches all kernels off, `uncompiled` those made by a compiler that is an extra of its own;
`XFORMER_CHECK_KERNELS=1` compares the first call of every kernel, and the derivative at that place, with the portable code and
raises on a mismatch. Both are read when they are first needed.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from xformer.autodiff import Implementation
from xformer.autodiff.backward import unbroadcast
from xformer.backends import (
    Array,
    DType,
    Namespace,
    array_namespace,
    backend_name,
    base_namespace,
    device,
    dtype_name,
    is_floating,
    is_half_precision,
    to_host,
)
from xformer.environment import env_flag, env_value
from xformer.errors import BackendError, ConfigError, XformerError
from xformer.threads import apply_thread_limits, fork_safe_lock


class Kernel(NamedTuple):
    """A replacement of one operation for one library.

    supports(arrays, static) -> None when it can serve the call, else the reason why not, as a phrase.
    forward(*arrays, save, **static) -> (output, residuals)
    vjp(g, residuals, needs, **static) -> one cotangent for each array; None where the operation has no derivative
    priority: of several kernels that support a call, the one with the highest priority runs
    kind: a class of kernels that XFORMER_KERNELS can switch off: "jit" or "cudnn"; empty for all others
    tolerance: the largest relative difference from the portable code that XFORMER_CHECK_KERNELS accepts (float32 and
        float64)
    """

    name: str
    operation: str
    backend: str
    supports: Callable[[tuple[Any, ...], dict[str, Any]], str | None]
    forward: Callable[..., tuple[Any, Any]]
    vjp: Callable[..., tuple[Any, ...]] | None
    priority: int = 0
    kind: str = ""
    tolerance: float = 1e-4


# All operations by name; each enters itself when it is made.
OPERATIONS: dict[str, Any] = {}
_KERNELS: dict[tuple[str, str], list[Kernel]] = {}
# By backend: the packages of its kernels, and the module that each of them requires.
_PACKAGES = {"numpy": (("numpy", "numpy"), ("numba", "numba")), "cupy": (("cupy", "cupy"),)}
_LOADED: set[str] = set()
_LOADING = fork_safe_lock()
_CHECKED: set[str] = set()


def register(kernel: Kernel) -> None:
    """Add a kernel; raises ConfigError where another one of the same operation and backend has its priority."""
    kernels = _KERNELS.setdefault((kernel.operation, kernel.backend), [])
    for other in kernels:
        if other.priority == kernel.priority and other.name != kernel.name:
            raise ConfigError(f"kernels {other.name} and {kernel.name} have the same priority, {kernel.priority}")
    kernels[:] = sorted([*(k for k in kernels if k.name != kernel.name), kernel], key=lambda k: -k.priority)


def select(operation: str, xp: Namespace, arrays: tuple[Any, ...], static: dict[str, Any]) -> Kernel | None:
    """Return the kernel that serves a call on arrays of the library `xp`, or None for the portable code."""
    mode = _mode()
    for kernel in _kernels_of(operation, backend_name(xp)):
        if not _off(kernel, mode) and kernel.supports(arrays, static) is None:
            return kernel
    return None


def has_kernel(operation: str, *arrays: Array) -> bool:
    """Whether the library of arrays has kernels for an operation, whatever they support."""
    mode = _mode()
    name = backend_name(base_namespace(array_namespace(*arrays)))
    return any(not _off(kernel, mode) for kernel in _kernels_of(operation, name))


# They widen half-way: a bfloat16 times a number is a float32; nor do all functions take it, or take 16 bits fast.
_NEEDS_UPCAST = ("numpy", "cupy")


def result_dtype(operation: str, xp: Namespace, arrays: tuple[Any, ...]) -> DType | None:
    """The dtype that a portable definition of upcast arrays is rounded to, once: that of the first array.

    None where the definition takes the arrays as they are.
    """
    if (
        not OPERATIONS[operation].compute_in_float32
        or backend_name(xp) not in _NEEDS_UPCAST
        or not any(map(_is_half_precision, arrays))
    ):
        return None
    return arrays[0].dtype


def upcast(xp: Namespace, arrays: Sequence[Any]) -> tuple[Any, ...]:
    """The same arrays, those of 16 bits upcast to float32; None stays None."""
    return tuple(xp.astype(array, xp.float32) if _is_half_precision(array) else array for array in arrays)


def _is_half_precision(array: Any) -> bool:
    return array is not None and is_half_precision(array.dtype)


def explain(operation: str, *arrays: Any, **static: Any) -> str:
    """Say, one line a candidate, which path serves `operation` on these arrays, and why the others do not.

    Arrays and settings are those of the operation itself, all of them, None where an array is absent.

    Raises ConfigError for an operation that there is not, and for arguments that are not its own.
    """
    if operation not in OPERATIONS:
        near = difflib.get_close_matches(str(operation), OPERATIONS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known operations: {', '.join(sorted(OPERATIONS))}"
        raise ConfigError(f"unknown operation {operation!r}; {hint}")
    taken = inspect.signature(OPERATIONS[operation].portable.forward)
    settings = {name: None for name, parameter in taken.parameters.items() if parameter.kind is parameter.KEYWORD_ONLY}
    try:
        taken.bind(*arrays, **settings | static)
        return _explained(operation, arrays, static)
    except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        if isinstance(error, XformerError):
            raise
        raise ConfigError(
            f"{operation} was asked about with {len(arrays)} arrays and {', '.join(static) or 'no settings'}; expected "
            f"{', '.join(name for name in taken.parameters if name != 'save')}, with None for arrays that are absent"
        ) from error


def _explained(operation: str, arrays: tuple[Any, ...], static: dict[str, Any]) -> str:
    xp = base_namespace(array_namespace(*arrays))
    lines, served, mode = [], False, _mode()
    for kernel in _kernels_of(operation, backend_name(xp)):
        reason = f"XFORMER_KERNELS={mode}" if _off(kernel, mode) else kernel.supports(arrays, static)
        if reason is None and not served:
            served = True
            lines.append(f"{operation} on {backend_name(xp)}: served by {kernel.name}")
        else:
            lines.append(
                f"{operation} on {backend_name(xp)}: not {kernel.name}: {reason or 'another kernel comes first'}"
            )
    dtype = None if served else result_dtype(operation, xp, arrays)
    if dtype is not None:
        lines.append(f"{operation} on {backend_name(xp)}: in float32, and rounded once to {dtype_name(dtype)}")
        lines.append(_explained(operation, upcast(xp, arrays), static))
    elif not served:
        lines.append(f"{operation} on {backend_name(xp)}: served by the portable definition")
    return "\n".join(lines)


def _mode() -> str:
    mode = env_value("XFORMER_KERNELS", "auto")
    if mode not in ("auto", "portable") and not set(mode.split(",")) <= {"no-jit", "no-cudnn"}:
        env_value.cache_clear()  # so that a corrected value is read
        raise ConfigError(
            f"XFORMER_KERNELS is {mode!r}; expected 'auto', 'portable', 'no-jit', 'no-cudnn' or 'no-jit,no-cudnn'"
        )
    return mode


def _off(kernel: Kernel, mode: str) -> bool:
    """Return whether XFORMER_KERNELS switches a kernel off."""
    return mode == "portable" or (kernel.kind != "" and f"no-{kernel.kind}" in mode.split(","))


def load(xp: Namespace) -> None:
    """Load the kernels of a library; raises ConfigError for what XFORMER_KERNELS or XFORMER_CHECK_KERNELS cannot be."""
    _mode()
    env_flag("XFORMER_CHECK_KERNELS")
    _load(backend_name(base_namespace(xp)))


def _kernels_of(operation: str, name: str) -> Sequence[Kernel]:
    """The kernels that a library has for an operation, the one to ask first in front."""
    if name not in _LOADED:
        _load(name)
    return _KERNELS.get((operation, name), ())


def _load(name: str) -> None:
    """Import the kernels of a library the first time one of its arrays is seen; not every library has any."""
    # Threads that see their first array at the same time all wait: a few portable operations would change the bits.
    with _LOADING:
        for package, requirement in _PACKAGES.get(name, ()) if name not in _LOADED else ():
            if importlib.util.find_spec(requirement) is not None:
                importlib.import_module(f"xformer.kernels.{package}")
        apply_thread_limits()
        _LOADED.add(name)


def should_check(kernel: Kernel) -> bool:
    """Tell whether XFORMER_CHECK_KERNELS asks for a comparison that was not made yet."""
    return env_flag("XFORMER_CHECK_KERNELS") and kernel.name not in _CHECKED


def check(kernel: Kernel, portable: Implementation, arrays: tuple[Any, ...], static: dict[str, Any]) -> None:
    """Compare a kernel's output and derivative with the portable definition's, once, whether or not the call is traced.

    Raises BackendError when they differ by more than the kernel's tolerance, or when the kernel made a NaN
    that does not belong there.
    """
    _CHECKED.add(kernel.name)
    for save in (False, True) if kernel.vjp and portable.vjp else (False,):
        # Some kernels work in place, by agreement with their callers; those get copies.
        copies = tuple(None if array is None else array_namespace(array).asarray(array, copy=True) for array in arrays)
        output, residuals = kernel.forward(*copies, save=save, **static)
        expected, expected_residuals = portable.forward(*arrays, save=save, **static)
        pairs = zip(output, expected, strict=True) if isinstance(output, tuple) else [(output, expected)]
        for got, wanted in pairs:
            _compare(kernel, "", got, wanted, 0.0)
        if save:
            cotangents = _pull_back(kernel.vjp, output, residuals, arrays, static)
            wanted_cotangents = _pull_back(portable.vjp, expected, expected_residuals, arrays, static)
            # What should be zero, as the query's cotangent is when there is one key, is rounding of the others.
            least = 0.01 * max(map(_largest, wanted_cotangents), default=0.0)
            for got, wanted in zip(cotangents, wanted_cotangents, strict=True):
                _compare(kernel, "the derivative of ", got, wanted, least)


def _pull_back(vjp: Any, output: Any, residuals: Any, arrays: tuple[Any, ...], static: dict[str, Any]) -> list[Array]:
    """The cotangents of all floating arrays, in their shapes, for arbitrary cotangents of the outputs."""
    xp = array_namespace(*arrays)
    several = isinstance(output, tuple)
    g = [_arbitrary(each) for each in (output if several else (output,))]
    needs = tuple(array is not None and is_floating(array.dtype) for array in arrays)
    with importlib.import_module("numpy").errstate(all="ignore"):  # the call itself may need no derivative
        cotangents = vjp(g if several else g[0], residuals, needs, **static)
    return [
        xp.zeros_like(array) if cotangent is None else unbroadcast(xp, cotangent, tuple(array.shape), array.dtype)
        for array, cotangent, needed in zip(arrays, cotangents, needs, strict=True)
        if needed
    ]


def _arbitrary(output: Array) -> Array:
    xp = array_namespace(output)
    g = xp.cos(xp.arange(math.prod(output.shape), dtype=xp.float32, device=device(output)))
    return xp.astype(xp.reshape(g, output.shape), output.dtype)


# What a few roundings make of these dtypes, whatever the kernel.
_ROUNDING = {"float16": 4e-3, "bfloat16": 3e-2}


def _compare(kernel: Kernel, what: str, got: Array, wanted: Array, least: float) -> None:
    """Raise BackendError unless `got` is near what is wanted, in relation to its largest value or to `least`."""
    scale = max(_largest(wanted), least, 1e-30)
    tolerance = max(kernel.tolerance, _ROUNDING.get(dtype_name(wanted.dtype), 0.0))
    got, wanted = to_host(got), to_host(wanted)
    differs = (got != wanted) & ((got == got) | (wanted == wanted))  # infinities and NaN where they belong are right
    difference = float(abs(got[differs] - wanted[differs]).max(initial=0.0)) / scale
    if not difference <= tolerance:
        raise BackendError(
            f"kernel {kernel.name} differs from {what}the portable {kernel.operation} by {difference:.1e} (relative); "
            f"at most {tolerance:.0e} is accepted; set XFORMER_KERNELS=portable and report it"
        )


def _largest(array: Array) -> float:
    """The largest finite magnitude."""
    magnitudes = abs(to_host(array))
    return float(magnitudes[magnitudes < math.inf].max(initial=0.0))
