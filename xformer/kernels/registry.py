"""Kernel selection: which implementation runs an operation.

An operation (`ops/`) is defined by portable Array API code. A kernel is an implementation of one operation for one
backend. Among the kernels that support a call, the one with the highest priority runs; otherwise the portable
definition does. `xformer/ops/README.md` describes all steps of a call.

Two environment variables, read once, at the first operation or when the kernels are loaded:

- `XFORMER_KERNELS`: `auto` (default), `portable` (no kernels), `no-jit` (no numba), `no-cudnn`, or `no-jit,no-cudnn`.
- `XFORMER_CHECK_KERNELS=1`: compare the first call of every kernel, and its derivative, with the portable definition,
  and raise BackendError if they differ.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from xformer.autodiff import Implementation
from xformer.autodiff.backward import unbroadcast
from xformer.backends import (
    Array,
    Backend,
    DType,
    Namespace,
    array_namespace,
    backend_name,
    backend_of,
    base_namespace,
    device,
    dtype_name,
    is_floating,
    is_half_precision,
    resolve,
    to_host,
)
from xformer.backends.backend import on_load
from xformer.environment import clear_cache, env_flag, env_value
from xformer.errors import BackendError, ConfigError, XformerError, nearest_hint
from xformer.threads import Collector, apply_thread_limits, fork_safe_lock


class Kernel(NamedTuple):
    """An implementation of one operation for one backend.

    `forward` and `vjp` are those of `autodiff.Implementation`.

    Attributes:
        name: Unique name, "package.operation", as in "numba.layer_norm".
        operation: Name of the operation that the kernel implements.
        backend: Name of the array library that it takes, as in "numpy".
        supports: `supports(arrays, static)` returns None if the kernel can run the call, else the reason as a phrase.
        forward: `forward(*arrays, save, **static)` returns (output, residuals).
        vjp: `vjp(g, residuals, needs, **static)` returns one cotangent per array; None if the operation has no
            derivative, or if `supports_vjp` always gives a reason.
        priority: Of several kernels that support a call, the one with the highest priority runs. Ours use 0 for the
            functions of a library, 10 for flash attention and cuDNN, 20 for numba.
        disabled_by: Value of XFORMER_KERNELS that switches the kernel off, "no-jit" or "no-cudnn". "portable" switches
            off every kernel.
        tolerance: Largest relative difference from the portable definition that XFORMER_CHECK_KERNELS accepts for
            float32 and float64; infinity: it is not compared.
        is_recordable: Whether `xformer.capture` records the calls that the kernel makes, so that a replay runs none of
            its Python code. Such a kernel allocates by the functions of `backends.recording`, reads no values on the
            host and has no shapes that depend on values. Each replay calls the other kernels again.
        supports_vjp: As `supports`, for calls that xformer differentiates and that `supports` accepts. None: the kernel
            differentiates all of them.
    """

    name: str
    operation: str
    backend: str
    supports: Callable[[tuple[Any, ...], dict[str, Any]], str | None]
    forward: Callable[..., tuple[Any, Any]]
    vjp: Callable[..., tuple[Any, ...]] | None
    priority: int = 0
    disabled_by: str = ""
    tolerance: float = 1e-4
    is_recordable: bool = False
    supports_vjp: Callable[[tuple[Any, ...], dict[str, Any]], str | None] | None = None

    def refusal(self, arrays: tuple[Any, ...], static: dict[str, Any], *, save: bool) -> str | None:
        """Return None if the kernel can run a call, and differentiate it if `save` is True, else the reason."""
        reason = self.supports(arrays, static)
        return self.supports_vjp(arrays, static) if reason is None and save and self.supports_vjp else reason


# All operations by name; each adds itself when it is created.
OPERATIONS: dict[str, Any] = {}
_KERNELS: dict[tuple[str, str], list[Kernel]] = {}  # by operation and backend, highest priority first
# The kernel packages of each backend, and the module that each package requires.
_PACKAGES = {
    "numpy": (("numpy", "numpy"), ("numba", "numba")),
    "cupy": (("cupy", "cupy"),),
    "torch": (("torch", "torch"),),
}
_LOADED: set[str] = set()
_LOADING = fork_safe_lock()
_CHECKED: set[str] = set()


class Selection(NamedTuple):
    """The outcome of one kernel selection: what runs, and why the other kernels do not."""

    operation: str
    backend: str
    implementation: str
    rejected: tuple[tuple[str, str], ...]  # names of kernels, and reasons

    def describe(self, count: int = 1) -> str:
        """Return one line, and an indented one for each kernel that does not run."""
        calls = f" ({count} calls)" if count > 1 else ""
        lines = (f"  not {name}: {reason}" for name, reason in self.rejected)
        return "\n".join([f"{self.operation} on {self.backend}: {self.implementation}{calls}", *lines])


# Selections of the call that `explain` follows.
_selections: Collector[Selection] = Collector("kernel_selections")


def register(kernel: Kernel) -> None:
    """Add a kernel, replacing a kernel of the same name.

    Args:
        kernel: The kernel.

    Raises:
        ConfigError: If another kernel of the same operation and backend has the same priority.
    """
    kernels = _KERNELS.setdefault((kernel.operation, kernel.backend), [])
    for other in kernels:
        if other.priority == kernel.priority and other.name != kernel.name:
            raise ConfigError(
                f"kernel {kernel.name} has priority {kernel.priority}, as has {other.name}; expected another priority"
            )
    kernels[:] = sorted([*(k for k in kernels if k.name != kernel.name), kernel], key=lambda k: -k.priority)


def select(
    operation: str, xp: Namespace, arrays: tuple[Any, ...], static: dict[str, Any], *, save: bool = False
) -> Kernel | None:
    """Return the kernel that runs a call on arrays of `xp`, or None for the portable definition.

    `save` is True if xformer differentiates the call.
    """
    selections = _selections.items()
    if selections is not None:
        selections.append(_selection(operation, xp, arrays, static, save))
    mode = _mode()
    for kernel in _kernels_of(operation, backend_name(xp)):
        if _is_enabled(kernel, mode) and kernel.refusal(arrays, static, save=save) is None:
            return kernel
    return None


def has_kernel(operation: str, *arrays: Array) -> bool:
    """Return whether the backend of `arrays` has enabled kernels for an operation, whichever calls they support."""
    mode = _mode()
    name = backend_name(base_namespace(array_namespace(*arrays)))
    return any(_is_enabled(kernel, mode) for kernel in _kernels_of(operation, name))


def result_dtype(operation: str, xp: Namespace, arrays: tuple[Any, ...]) -> DType | None:
    """Return the dtype to which the portable definition of upcast arrays is rounded, that of the first array.

    None means that the definition takes the arrays as they are.
    """
    if (
        not OPERATIONS[operation].compute_in_float32
        or not backend_of(xp).needs_upcast
        or not any(map(_is_half_precision, arrays))
    ):
        return None
    return arrays[0].dtype


def upcast(xp: Namespace, arrays: Sequence[Any]) -> tuple[Any, ...]:
    """Cast float16 and bfloat16 arrays to float32; other arrays and None stay as they are."""
    return tuple(xp.astype(array, xp.float32) if _is_half_precision(array) else array for array in arrays)


def _is_half_precision(array: Any) -> bool:
    return array is not None and is_half_precision(array.dtype)


def explain(call: str | Callable[[], Any], *arrays: Any, **static: Any) -> str:
    """Describe which implementation runs an operation, and why the other kernels do not.

        explain(lambda: model(x))
        explain("softmax", x, mask)
        explain("softmax", x, mask, save=True)  # if xformer differentiates it

    Args:
        call: A function without arguments, which is called once and whose operations are listed; or the name of an
            operation, which is not run.
        *arrays: With a name: all arrays of the operation, None for optional arrays that are absent.
        **static: With a name: its keyword arguments, and whether it is differentiated (`save`, default False).

    Returns:
        For each different selection one line with the operation, the backend and the implementation, and one indented
        line for each kernel that was not selected.

    Raises:
        ConfigError: If the operation is unknown, or takes other arguments.
    """
    if callable(call):
        return _explain_call(call)
    if call not in OPERATIONS:
        raise ConfigError(f"unknown operation {call!r}; {nearest_hint(str(call), OPERATIONS)}")
    signature = inspect.signature(OPERATIONS[call].portable.forward)
    keywords = {name: None for name, value in signature.parameters.items() if value.kind is value.KEYWORD_ONLY}
    try:
        signature.bind(*arrays, **keywords | static)
        return _explain_operation(call, arrays, static, save=static.pop("save", False))
    except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        if isinstance(error, XformerError):
            raise
        raise ConfigError(
            f"explain({call!r}) got {len(arrays)} arrays and {', '.join(static) or 'no keywords'}; expected "
            f"{', '.join(name for name in signature.parameters if name != 'save')}, with None for absent arrays"
        ) from error


def _explain_call(call: Callable[[], Any]) -> str:
    with _selections.collect() as selections:
        call()
    return "\n".join(selection.describe(count) for selection, count in Counter(selections).items())


def _explain_operation(operation: str, arrays: tuple[Any, ...], static: dict[str, Any], *, save: bool) -> str:
    xp = base_namespace(array_namespace(*arrays))
    selection = _selection(operation, xp, arrays, static, save).describe()
    if select(operation, xp, arrays, static, save=save) is None and result_dtype(operation, xp, arrays) is not None:
        return f"{selection}\n{_explain_operation(operation, upcast(xp, arrays), static, save=save)}"
    return selection


def _selection(operation: str, xp: Namespace, arrays: tuple[Any, ...], static: dict[str, Any], save: bool) -> Selection:
    implementation, rejected, mode = "", [], _mode()
    for kernel in _kernels_of(operation, backend_name(xp)):
        reason = kernel.refusal(arrays, static, save=save) if _is_enabled(kernel, mode) else f"XFORMER_KERNELS={mode}"
        if reason is None and not implementation:
            implementation = kernel.name
        else:
            rejected.append((kernel.name, reason or "lower priority"))
    if not implementation:
        dtype = result_dtype(operation, xp, arrays)
        portable = "portable definition"
        implementation = portable if dtype is None else f"in float32, rounded to {dtype_name(dtype)}"
    return Selection(operation, backend_name(xp), implementation, tuple(rejected))


def _mode() -> str:
    mode = env_value("XFORMER_KERNELS", "auto")
    if mode not in ("auto", "portable") and not {*mode.split(",")} <= {"no-jit", "no-cudnn"}:
        clear_cache()  # so that a corrected value is read
        raise ConfigError(
            f"XFORMER_KERNELS is {mode!r}; expected 'auto', 'portable', 'no-jit', 'no-cudnn' or 'no-jit,no-cudnn'"
        )
    return mode


def _is_enabled(kernel: Kernel, mode: str) -> bool:
    return mode != "portable" and kernel.disabled_by not in mode.split(",")


def load(xp: Namespace) -> None:
    """Import the kernels of a backend.

    Args:
        xp: An array namespace.

    Raises:
        ConfigError: If XFORMER_KERNELS or XFORMER_CHECK_KERNELS has an invalid value.
    """
    _mode()
    env_flag("XFORMER_CHECK_KERNELS")
    _load(backend_name(base_namespace(xp)))


def _kernels_of(operation: str, backend: str) -> Sequence[Kernel]:
    """Return the kernels of an operation for a backend, highest priority first."""
    if backend not in _LOADED:
        _load(backend)
    return _KERNELS.get((operation, backend), ())


def _load(backend: str) -> None:
    # Other threads wait until all kernels are loaded: a call that ran the portable definition would change the bits.
    with _LOADING:
        for package, requirement in _PACKAGES.get(backend, ()) if backend not in _LOADED else ():
            if importlib.util.find_spec(requirement) is not None:
                importlib.import_module(f"xformer.kernels.{package}")
        apply_thread_limits()
        _LOADED.add(backend)


def _load_with_backend(backend: Backend) -> None:
    """Load the kernels for torch before the first operation, because torch.compile traces no imports."""
    if backend.name == "torch":
        load(resolve("torch"))


on_load(_load_with_backend)


def should_check(kernel: Kernel) -> bool:
    """Return whether XFORMER_CHECK_KERNELS is set and the kernel has not been checked yet."""
    return env_flag("XFORMER_CHECK_KERNELS") and kernel.name not in _CHECKED and kernel.tolerance < math.inf


def check(kernel: Kernel, portable: Implementation, arrays: tuple[Any, ...], static: dict[str, Any]) -> None:
    """Compare a kernel's output and derivative with those of the portable definition.

    Args:
        kernel: The kernel, which supports the call.
        portable: The portable definition.
        arrays: Arguments of the call; the kernel gets copies, because some kernels work in place.
        static: Keyword arguments of the call.

    Raises:
        BackendError: If they differ by more than the kernel's tolerance, or if the kernel returns NaN where the
            definition does not.
    """
    _CHECKED.add(kernel.name)
    is_differentiable = kernel.vjp and portable.vjp and kernel.refusal(arrays, static, save=True) is None
    for save in (False, True) if is_differentiable else (False,):
        copies = tuple(None if array is None else array_namespace(array).asarray(array, copy=True) for array in arrays)
        output, residuals = kernel.forward(*copies, save=save, **static)
        expected, expected_residuals = portable.forward(*arrays, save=save, **static)
        pairs = zip(output, expected, strict=True) if isinstance(output, tuple) else [(output, expected)]
        for actual, reference in pairs:
            _compare(kernel, "", actual, reference, 0.0)
        if save:
            cotangents = _cotangents(kernel.vjp, output, residuals, arrays, static)
            references = _cotangents(portable.vjp, expected, expected_residuals, arrays, static)
            # A cotangent that should be zero, as that of the query with a single key, is rounding error of the others.
            min_scale = 0.01 * max(map(_max_abs, references), default=0.0)
            for actual, reference in zip(cotangents, references, strict=True):
                _compare(kernel, "the derivative of ", actual, reference, min_scale)


def _cotangents(vjp: Any, output: Any, residuals: Any, arrays: tuple[Any, ...], static: dict[str, Any]) -> list[Array]:
    """Return the cotangents of all floating arrays, in the shapes of these, for arbitrary cotangents of the outputs."""
    xp = array_namespace(*arrays)
    g = [_arbitrary(y) for y in (output if isinstance(output, tuple) else (output,))]
    needs = tuple(array is not None and is_floating(array.dtype) for array in arrays)
    with np.errstate(all="ignore"):  # the call itself may need no derivative
        cotangents = vjp(g if isinstance(output, tuple) else g[0], residuals, needs, **static)
    return [
        xp.zeros_like(array) if cotangent is None else unbroadcast(xp, cotangent, tuple(array.shape), array.dtype)
        for array, cotangent, needed in zip(arrays, cotangents, needs, strict=True)
        if needed
    ]


def _arbitrary(output: Array) -> Array:
    xp = array_namespace(output)
    g = xp.cos(xp.arange(math.prod(output.shape), dtype=xp.float32, device=device(output)))
    return xp.astype(xp.reshape(g, output.shape), output.dtype)


# Relative error of a few roundings in these dtypes.
_ROUNDING = {"float16": 4e-3, "bfloat16": 3e-2}


def _compare(kernel: Kernel, quantity: str, actual: Array, expected: Array, min_scale: float) -> None:
    """Raise BackendError if `actual` differs, relative to the largest expected value or to `min_scale`."""
    scale = max(_max_abs(expected), min_scale, 1e-30)
    tolerance = max(kernel.tolerance, _ROUNDING.get(dtype_name(expected.dtype), 0.0))
    actual, expected = to_host(actual), to_host(expected)
    differs = (actual != expected) & ((actual == actual) | (expected == expected))  # equal infinities and NaN agree
    difference = float(abs(actual[differs] - expected[differs]).max(initial=0.0)) / scale
    if not difference <= tolerance:
        raise BackendError(
            f"kernel {kernel.name} differs from {quantity}the portable {kernel.operation} by {difference:.1e} "
            f"(relative); expected at most {tolerance:.0e}; set XFORMER_KERNELS=portable and report this"
        )


def _max_abs(array: Array) -> float:
    """Return the largest finite magnitude."""
    magnitudes = abs(to_host(array))
    return float(magnitudes[magnitudes < math.inf].max(initial=0.0))
