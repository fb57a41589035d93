"""The seam between the CuPy kernels and CUDA: sources from `cuda/`, compiled when they are first needed.

Everything else in these kernels is plain Python on arrays, so a launcher for another kind of array (the tests have one
for NumPy's, which runs the sources on the CPU) needs to replace `launch`, `is_here` and `cublas.pointer` only.
"""

from __future__ import annotations

import functools
import importlib
from pathlib import Path
from typing import Any

from xformer.backends import resolve

_SOURCES = Path(__file__).parent / "cuda"
OPTIONS = ("--std=c++17",)


def source(name: str) -> str:
    """The text of a source, beginning with what all have in common: it needs no header."""
    return "\n".join((_SOURCES / f"{part}.cu").read_text(encoding="utf-8") for part in ("common", name))


def launch(kernel: str, dtypes: tuple[str, ...], blocks: int, threads: int, *arguments: Any) -> None:
    """Run a kernel on the current stream; it does not wait for it, and no blocks are no launch.

    kernel: source and function template, as "norms.normalize"; dtypes: the names of the types it is made for.
    threads: of a block, a multiple of 32. arguments: arrays, as the address of their first element, None, as a null
    pointer, int, as long long, float, as double, and NumPy arrays of one element, by value.

    Raises BackendError where CuPy is not installed.
    """
    if blocks:
        function = _compiled(kernel, dtypes)
        function((blocks,), (threads,), tuple(0 if argument is None else argument for argument in arguments))


def is_here(array: Any) -> bool:
    """Whether an array lives on the current device, which is where a launch runs."""
    return array.data.device_id == cuda().runtime.getDevice()  # type: ignore[no-any-return]


@functools.cache
def cuda() -> Any:
    """CuPy's own access to CUDA."""
    return importlib.import_module("cupy").cuda


@functools.cache
def _compiled(kernel: str, dtypes: tuple[str, ...]) -> Any:
    """One instance of a template; CuPy keeps what it compiled in memory, for each device, and on the disk."""
    file, _, function = kernel.partition(".")
    expression = instance(function, dtypes)
    module = resolve("cupy").RawModule(code=source(file), options=OPTIONS, name_expressions=(expression,))
    return module.get_function(expression)


def instance(function: str, dtypes: tuple[str, ...]) -> str:
    """How C++ names a function template made for some dtypes."""
    return f"{function}<{', '.join(dtypes)}>"
