"""Comparison of kernels with the portable definition at their first use on a machine, before their results count.

The kernels for GPUs run on drivers and libraries that nobody tested together. So each of them computes random arrays
of the dtypes, the layout and about the sizes of the first call of a kind, forward and backward. One that fails or
differs is switched off with a warning, and the next kernel or the definition runs. Verdicts are kept in a file.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Hashable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from xformer.backends import array_namespace, backend_of, device, dtype_name, from_host
from xformer.environment import env_value, on_clear
from xformer.errors import BackendError, XformerError
from xformer.io import read_json, write_json
from xformer.ops.kernel_check import compare

if TYPE_CHECKING:
    from xformer.ops.operation import Kernel, Operation

_MAX_SIZE, _KEPT_PART = 640, 128  # a larger size is reduced to 512 and what it has beyond a multiple of 128
_MAX_ROWS, _MAX_IDENTITIES = 16, 16
_GUARDED: dict[tuple[str, str], Verdicts] = {}  # by kernel and namespace
on_clear(_GUARDED.clear)


def guarded(kernel: Kernel, operation: Operation, xp: Any) -> Kernel:
    """Return the kernel with a `why_not` that also gives the reason if it failed its comparison."""
    verdicts = _GUARDED.setdefault((kernel.name, xp.__name__), Verdicts(kernel, operation))
    return kernel._replace(why_not=verdicts.why_not) if kernel.tolerance < math.inf else kernel


class Verdicts:
    """The kinds of calls for which a kernel was compared: "" if it passed, or the reason why it did not."""

    def __init__(self, kernel: Kernel, operation: Operation) -> None:
        self._kernel, self._operation = kernel, operation
        self._known: dict[Hashable, str] = {}

    def why_not(self, *arrays: Any, save: bool, **options: Any) -> str | None:
        """Return None if the kernel can run a call, else the reason in words."""
        refusal = self._kernel.why_not
        reason = None if refusal is None else refusal(*arrays, save=save, **options)
        if reason is not None:
            return reason
        kind = save, *map(_kind, arrays), *((name, _kind(value)) for name, value in options.items())
        if kind not in self._known:
            self._known[kind] = self._verdict(f"{self._kernel.name} {kind}", arrays, options, save)
        return self._known[kind] or None

    def _verdict(self, key: str, arrays: Any, options: dict[str, Any], save: bool) -> str:
        xp = array_namespace(*arrays)
        identity = backend_of(xp).kernel_identity() or ""
        verdict = _read().get(identity, {}).get(key)
        if not isinstance(verdict, str):
            verdict = self._compared(arrays, options, save)
            if verdict is None:
                return ""  # it is compared in the next process
            _write(identity, key, verdict)
        if verdict:
            warnings.warn(
                f"kernel {self._kernel.name} is switched off, and {self._operation.name} may be slower: {verdict}",
                RuntimeWarning,
                stacklevel=2,
            )
        return verdict

    def _compared(self, arrays: Any, options: dict[str, Any], save: bool) -> str | None:
        """Return "" if the kernel agrees with the definition, the reason if not, or None if this is unknown."""
        for reduced in (True, False):
            try:
                examples = _examples(self._operation, arrays, reduced=reduced)
                compare(self._kernel, self._operation, examples, options, save=save)
            except MemoryError:
                return None
            except Exception as error:  # noqa: BLE001 - whatever a compiler or a library raises
                if isinstance(error, BackendError) or not reduced:
                    return " ".join(f"{type(error).__name__}: {error}".split())[:500]
                continue  # options, such as the number of heads, may fit the original sizes only
            return ""
        return None


def _kind(value: Any) -> Hashable:
    """Return what a comparison depends on: of an array its dtype, its axes of size 1 and its layout."""
    if value is None or isinstance(value, int | float):
        return bool(value)
    if isinstance(value, str):
        return value
    if isinstance(value, tuple):
        return tuple(map(_kind, value))
    shape = value.shape
    return value.dtype, len(shape), 1 in shape and tuple(size == 1 for size in shape), value.flags.c_contiguous


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
        example = from_host(xp, host, dtype=dtype_name(array.dtype), device=device(array))
        examples.append(xp.permute_dims(example, tuple(np.argsort(order))) if example.ndim > 1 else example)
    return tuple(examples)


def _reduced(size: int, *, is_first: bool, is_last: bool) -> int:
    if is_last and size == 1:
        return 2  # the variance of a single number is zero, and its derivative all rounding
    if is_first:
        return size if size <= _MAX_ROWS else _MAX_ROWS // 2 + size % (_MAX_ROWS // 2)
    return size if size <= _MAX_SIZE else _MAX_SIZE - _KEPT_PART + size % _KEPT_PART


def _random(rng: np.random.Generator, shape: tuple[int, ...], argument: Any, sizes: dict[Any, int]) -> Any:
    if argument.kind == "bool":
        return rng.random(shape) < 0.8
    if argument.bound:
        return rng.integers(0, sizes[argument.bound], shape)
    values = rng.standard_normal(shape, dtype="float32")
    return abs(values) if argument.is_nonnegative else values


# --- the file ---------------------------------------------------------------------------------------------------------


def _path() -> Path:
    return Path(env_value("XDG_CACHE_HOME") or Path.home() / ".cache") / "xformer" / "kernel_checks.json"


@functools.cache
def _read() -> dict[str, Any]:
    """Return the verdicts of all machines that share the directory: by identity, then by kernel and kind."""
    try:
        return {key: value for key, value in read_json(_path(), "verdicts").items() if isinstance(value, dict)}
    except (OSError, RuntimeError, XformerError):  # without the file, or a home directory
        return {}


on_clear(_read.cache_clear)


def _write(identity: str, key: str, verdict: str) -> None:
    verdicts = _read()
    verdicts.setdefault(identity, {})[key] = verdict
    while len(verdicts) > _MAX_IDENTITIES:
        del verdicts[next(iter(verdicts))]
    try:
        _path().parent.mkdir(parents=True, exist_ok=True)
        write_json(_path(), verdicts)
    except (OSError, RuntimeError, XformerError):
        return  # compared in each process
