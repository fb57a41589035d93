"""Comparison of kernels with the portable definitions of their operations.

With XFORMER_CHECK_KERNELS=1, the first call of each kernel is compared, and its derivative.

Kernels for GPUs depend on combinations of drivers and libraries that nobody tested together. So each of them is
compared before its first use on a machine: it computes random arrays of the dtypes, the layout and about the sizes of
the first call of its kind, forward and backward. One that fails or differs is switched off with a warning, and the next
kernel or the definition runs. Results are kept in a file, a `CacheFile`, as are plans of CUDA libraries.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any

import numpy as np

from xformer.backends import Array, array_namespace, device, dtype_name, is_floating, to_host
from xformer.environment import env_value, on_clear
from xformer.errors import BackendError, CheckpointError
from xformer.io import read_json, write_json
from xformer.tracing.grad import unbroadcast

# --- results in files, which the processes of a user share ------------------------------------------------------------


def cache_directory() -> Path:
    """Return the user's cache directory; RuntimeError if there is no home directory."""
    return Path(env_value("XDG_CACHE_HOME") or Path.home() / ".cache") / "xformer"


class CacheFile:
    """A JSON file of results in the user's cache directory, by what they depend on, such as versions, and by a key.

    Without such a directory, or if the file cannot be read or written, results last as long as the process.

    Args:
        name: Name of the file.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._results: dict[str, Any] | None = None
        on_clear(self._forget)

    @property
    def path(self) -> Path:
        """Path of the file."""
        return cache_directory() / self._name

    def get(self, identity: str, key: str) -> Any:
        """Return a result, or None."""
        return self.all(identity).get(key)

    def all(self, identity: str) -> dict[str, Any]:
        """Return all results of an identity by their keys."""
        if self._results is None:
            self._results = self._read()
        return self._results.get(identity, {})

    def set(self, identity: str, key: str, result: Any) -> None:
        """Keep a result, beside those that other processes have written meanwhile."""
        merged = self._read()
        for each, results in (*(self._results or {}).items(), (identity, {key: result})):
            merged.setdefault(each, {}).update(results)
        self._results = merged
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_json(self.path, merged)
        except (OSError, RuntimeError, CheckpointError):
            return

    def _read(self) -> dict[str, Any]:
        try:
            found = read_json(self.path, "results").items()
        except (OSError, RuntimeError, CheckpointError):  # without the file, or a home directory
            return {}
        return {identity: results for identity, results in found if isinstance(results, dict)}

    def _forget(self) -> None:
        self._results = None


# --- comparison -------------------------------------------------------------------------------------------------------

# Classes of operation.py, which imports this module.
Kernel = Any
Operation = Any

_CHECKED: set[str] = set()  # names of kernels
_RESULTS = CacheFile("kernel_checks.json")  # of all machines that share the directory: by identity, kernel and kind


def checked(kernel: Kernel, operation: Operation) -> Callable[..., tuple[Any, Any]]:
    """Return the forward of a kernel that compares its first call with the definition of the operation.

    The comparison raises BackendError if they differ by more than the kernel's tolerance, or if the kernel returns NaN
    where the definition does not.
    """
    if kernel.tolerance == math.inf:
        return kernel.forward

    def forward(*arrays: Any, save: bool, **options: Any) -> tuple[Any, Any]:
        if kernel.name not in _CHECKED:
            _CHECKED.add(kernel.name)
            dtype = operation.check(*arrays)
            is_saved = kernel.refusal(arrays, options, dtype, save=True) is None
            try:
                compare(kernel, operation, arrays, options, save=is_saved)
            except BackendError as error:
                raise BackendError(f"{error}; please report this, and set XFORMER_KERNELS=portable") from error
        return kernel.forward(*arrays, save=save, **options)

    return forward


def compare(
    kernel: Kernel, operation: Operation, arrays: tuple[Any, ...], options: dict[str, Any], *, save: bool
) -> None:
    """Compare the outputs of a kernel with those of the definition and, with `save`, the cotangents.

    The kernel gets copies of the arrays, because some kernels work in place.

    Raises:
        BackendError: If they differ by more than the kernel's tolerance, or if the kernel returns NaN where the
            definition does not.
    """
    definition = operation.portable(array_namespace(*arrays), arrays, without_kernels=True)
    for is_saved in (False, True) if save and kernel.vjp and definition.vjp else (False,):
        copies = tuple(None if array is None else array_namespace(array).asarray(array, copy=True) for array in arrays)
        output, residuals = kernel.forward(*copies, save=is_saved, **options)
        expected, expected_residuals = definition.forward(*arrays, save=is_saved, **options)
        pairs = zip(output, expected, strict=True) if isinstance(output, tuple) else [(output, expected)]
        for actual, reference in pairs:
            _compare(kernel, "", actual, reference, 0.0)
        if is_saved:
            cotangents = _cotangents(kernel.vjp, output, residuals, arrays, options)
            references = _cotangents(definition.vjp, expected, expected_residuals, arrays, options)
            # A cotangent that is zero in exact arithmetic holds only rounding error: compare it with the largest one.
            min_scale = 0.01 * max(map(_max_abs, references), default=0.0)
            for actual, reference in zip(cotangents, references, strict=True):
                _compare(kernel, "the derivative of ", actual, reference, min_scale)


def _cotangents(vjp: Any, output: Any, residuals: Any, arrays: tuple[Any, ...], options: dict[str, Any]) -> list[Array]:
    """Return the cotangents of all floating arrays, in the shapes of these, for arbitrary cotangents of the outputs."""
    xp = array_namespace(*arrays)
    g = [_arbitrary(y) for y in (output if isinstance(output, tuple) else (output,))]
    needs = tuple(array is not None and is_floating(array.dtype) for array in arrays)
    with np.errstate(all="ignore"):  # the call itself may need no derivative
        cotangents = vjp(g if isinstance(output, tuple) else g[0], residuals, needs, **options)
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


def _compare(kernel: Kernel, quantity: str, actual: Any, expected: Any, min_scale: float) -> None:
    """Raise BackendError if `actual` differs, relative to the largest expected value or to `min_scale`."""
    if actual.shape != expected.shape:
        raise BackendError(
            f"kernel {kernel.name} returned shape {tuple(actual.shape)} for {quantity}the portable {kernel.operation}; "
            f"expected {tuple(expected.shape)}"
        )
    scale = max(_max_abs(expected), min_scale, 1e-30)
    tolerance = max(kernel.tolerance, _ROUNDING.get(dtype_name(expected.dtype), 0.0))
    actual, expected = to_host(actual), to_host(expected)
    differs = (actual != expected) & ((actual == actual) | (expected == expected))  # equal infinities and NaN agree
    difference = float(abs(actual[differs] - expected[differs]).max(initial=0.0)) / scale
    if not difference <= tolerance:
        raise BackendError(
            f"kernel {kernel.name} differs from {quantity}the portable {kernel.operation} by {difference:.1e} "
            f"(relative); expected at most {tolerance:.0e}"
        )


def _max_abs(array: Array) -> float:
    """Return the largest finite magnitude."""
    magnitudes = abs(to_host(array))
    return float(magnitudes[magnitudes < math.inf].max(initial=0.0))


# --- before the first use ---------------------------------------------------------------------------------------------

# Largest sizes of examples: of the first axis, the last, and others. A larger size is reduced to a multiple of _STEP
# and what it has beyond one.
_MAX_FIRST, _MAX_LAST, _MAX_OTHER, _STEP = 16, 2**16, 640, 128
_GUARDED: dict[tuple[str, str], Checks] = {}  # by kernel and namespace
on_clear(_GUARDED.clear)


def guarded(kernel: Kernel, operation: Operation, xp: Any) -> Kernel:
    """Return the kernel with a `why_not` that also gives the reason if it failed its comparison."""
    results = _GUARDED.setdefault((kernel.name, xp.__name__), Checks(kernel, operation))
    return kernel._replace(why_not=results.why_not) if kernel.tolerance < math.inf else kernel


class Checks:
    """The results of a kernel's comparisons by the key of the call: "" if it passed, or the reason why it did not."""

    def __init__(self, kernel: Kernel, operation: Operation) -> None:
        self._kernel, self._operation = kernel, operation
        self._known: dict[Hashable, str] = {}

    def why_not(self, *arrays: Any, save: bool, **options: Any) -> str | None:
        """Return None if the kernel can run a call, else the reason in words."""
        refusal = self._kernel.why_not
        reason = None if refusal is None else refusal(*arrays, save=save, **options)
        if reason is not None:
            return reason
        arrays, options = self._operation.example(arrays, options)
        key = save, *map(_key, arrays), *((name, _key(value)) for name, value in options.items())
        if key not in self._known:
            self._known[key] = self._result(f"{self._kernel.name} {key}", arrays, options, save)
        return self._known[key] or None

    def _result(self, key: str, arrays: Any, options: dict[str, Any], save: bool) -> str:
        xp: Any = array_namespace(*arrays)
        identity = xp.kernel_identity() or ""
        result = _RESULTS.get(identity, key)
        if not isinstance(result, str):
            result, is_lasting = self._compared(arrays, options, save)
            if is_lasting:
                _RESULTS.set(identity, key, result)
        if result:
            warnings.warn(
                f"kernel {self._kernel.name} is switched off, and {self._operation.name} may be slower: {result}; "
                f"please report this, and delete {_RESULTS.path} to compare again",
                RuntimeWarning,
                stacklevel=2,
            )
        return result

    def _compared(self, arrays: Any, options: dict[str, Any], save: bool) -> tuple[str, bool]:
        """Return "" if the kernel agrees with the definition, else the reason; and whether to keep the result."""
        for reduced in (True, False):
            try:
                examples = _examples(self._operation, arrays, reduced=reduced)
                compare(self._kernel, self._operation, examples, options, save=save)
            except MemoryError:
                break
            except BackendError as error:
                return str(error), True
            except Exception as error:  # noqa: BLE001 - whatever a compiler or a library raises
                if reduced:
                    continue  # options, such as the number of heads, may fit the original sizes only
                return " ".join(f"{type(error).__name__}: {error}".split())[:500], False
            return "", True
        return "", False


def _key(value: Any) -> Hashable:
    """Return the part of a call's key for an argument: of an array its dtype, the classes of its sizes, its layout."""
    if value is None or isinstance(value, int | float):
        return bool(value)
    if isinstance(value, str):
        return value
    if isinstance(value, tuple):
        return tuple(map(_key, value))
    if not hasattr(value, "dtype"):
        return type(value).__name__
    return value.dtype, _size_classes(value.shape), value.flags.c_contiguous


@functools.lru_cache(maxsize=4096)
def _size_classes(shape: tuple[int, ...]) -> str:
    """Return a letter for each axis but the first: its size is 1, a multiple of 8 or not, and large or not."""
    first = "" if len(shape) < 2 else "1" if shape[0] == 1 else "n"
    others = ("1" if size == 1 else "abAB"[(size % 8 > 0) + 2 * (size > _MAX_OTHER)] for size in shape[len(first) :])
    return first + "".join(others)


def failures(identity: str) -> dict[str, str]:
    """Return why kernels are switched off on a machine, by their names and the kinds of calls."""
    return {key: result for key, result in _RESULTS.all(identity).items() if isinstance(result, str) and result}


# --- example arrays ---------------------------------------------------------------------------------------------------


def _examples(operation: Operation, arrays: Any, *, reduced: bool) -> tuple[Any, ...]:
    """Return random arrays with the dtypes and memory orders of others, and smaller sizes."""
    rng, xp, sizes = np.random.default_rng(0), array_namespace(*arrays), dict[Any, int]()
    examples: list[Any] = []
    for argument, array in zip(operation.signature.arguments(operation.name, len(arrays)), arrays, strict=True):
        if array is None:
            examples.append(None)
            continue
        more = array.ndim - len(argument.sizes)  # negative if a mask has fewer axes than it broadcasts to
        names = [*((argument.more, place - more) for place in range(more)), *argument.sizes[max(0, -more) :]]
        shape = []
        for place, (name, size) in enumerate(zip(names, array.shape, strict=True)):
            if argument.is_broadcast and size == 1:
                shape.append(1)
                continue
            if name not in sizes:
                sizes[name] = _reduced(size, is_first=not place, is_last=place == array.ndim - 1) if reduced else size
            shape.append(sizes[name])
        order = np.argsort([-abs(stride) for stride in getattr(array, "strides", ())], kind="stable")
        order = order if len(order) == len(shape) else np.arange(len(shape))
        host = _random(rng, tuple(shape[axis] for axis in order), argument, sizes)
        example = xp.from_host(host, dtype=dtype_name(array.dtype), device=device(array))
        examples.append(xp.permute_dims(example, tuple(np.argsort(order))) if example.ndim > 1 else example)
    return tuple(examples)


def _reduced(size: int, *, is_first: bool, is_last: bool) -> int:
    """Return the size of an example's axis."""
    if is_last and size == 1:
        return 2  # the variance of a single number is zero, and its derivative all rounding
    most, step = (_MAX_FIRST, 8) if is_first else (_MAX_LAST if is_last else _MAX_OTHER, _STEP)
    return size if size <= most else most - step + size % step


def _random(rng: np.random.Generator, shape: tuple[int, ...], argument: Any, sizes: dict[Any, int]) -> Any:
    if argument.kind == "bool":
        return rng.random(shape) < 0.8
    if argument.bound:
        return rng.integers(0, sizes[argument.bound], shape)
    values = rng.standard_normal(shape, dtype="float32")
    values = abs(values) if argument.is_nonnegative else values
    return np.sort(values, axis=None).reshape(shape) if argument.kind == "int" else values  # as experts expect
