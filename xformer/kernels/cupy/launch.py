"""Launches of the CUDA sources in `cuda/`, which are compiled when they are first needed.

Everything else in the CuPy kernels is Python code on arrays. To run it on other arrays, as the tests do on the CPU,
replace `launch`, `is_current_device` and `cublas.pointer`.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import importlib.metadata
from pathlib import Path
from typing import Any

from xformer.backends import resolve

_SOURCES = Path(__file__).parent / "cuda"
OPTIONS = ("--std=c++17",)


def source(name: str) -> str:
    """Return the text of a source with the common part, which needs no header."""
    return "\n".join((_SOURCES / f"{part}.cu").read_text(encoding="utf-8") for part in ("common", name))


def launch(kernel: str, dtypes: tuple[str, ...], blocks: int, threads: int, *arguments: Any) -> None:
    """Enqueue a kernel on the current stream, unless there are no blocks.

    Args:
        kernel: Source and function template, as in "norms.normalize".
        dtypes: Template arguments: names of dtypes, and numbers in digits.
        blocks: Number of blocks.
        threads: Threads per block, a multiple of 32.
        *arguments: Arrays are passed as pointers, None as a null pointer, int as long long, float as double, and NumPy
            arrays of one element by value.

    Raises:
        BackendError: If CuPy is not installed.
    """
    if blocks:
        function = _compiled(kernel, dtypes)
        function((blocks,), (threads,), tuple(0 if argument is None else argument for argument in arguments))


def is_current_device(array: Any) -> bool:
    """Return whether an array is on the current device, on which launches run."""
    return array.data.device_id == cuda().runtime.getDevice()


@functools.cache
def cuda() -> Any:
    """Return the module cupy.cuda."""
    return importlib.import_module("cupy").cuda


def identity() -> str:
    """Return the current GPU, the versions of driver and libraries, and a hash of the sources of all operations."""
    return _identity(cuda().runtime.getDevice())


@functools.cache
def _identity(device: int) -> str:
    runtime, operations = cuda().runtime, _SOURCES.parents[1]
    paths = [*operations.rglob("*.cu"), *operations.rglob("*.py")]
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(paths))).hexdigest()[:16]
    numbers = [
        runtime.getDeviceProperties(device)["name"].decode(),
        f"driver {runtime.driverGetVersion()}",
        f"runtime {runtime.runtimeGetVersion()}",
        f"cupy {importlib.import_module('cupy').__version__}",
    ]
    for name in ("nvidia-cublas", "nvidia-cudnn-cu13", "nvidia-cudnn-cu12", "nvidia-cudnn-frontend"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            numbers.append(f"{name} {importlib.metadata.version(name)}")
    return ", ".join([*numbers, f"kernels {digest}"])


@functools.cache
def _compiled(kernel: str, dtypes: tuple[str, ...]) -> Any:
    """Compile an instance of a template; CuPy caches it in memory, per device, and on disk."""
    file, _, function = kernel.partition(".")
    expression = instance(function, dtypes)
    module = resolve("cupy").RawModule(code=source(file), options=OPTIONS, name_expressions=(expression,))
    return module.get_function(expression)


def instance(function: str, dtypes: tuple[str, ...]) -> str:
    """Return the C++ name of an instance of a function template."""
    return f"{function}<{', '.join(dtypes)}>"
