"""Error helpers: install hints agree with pyproject.toml, and out-of-memory errors of all libraries are recognized."""

from __future__ import annotations

import errno
import tomllib
from pathlib import Path

import numpy as np
import pytest

from xformer import errors
from xformer.errors import OutOfMemoryError, how_to_install, is_out_of_memory, out_of_memory

EXTRAS = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]["optional-dependencies"]


@pytest.mark.parametrize(("package", "extra"), errors._EXTRAS.items())
def test_install_hints_name_an_extra_that_has_the_package(package, extra):
    assert any(package.replace("_", "-") in requirement for requirement in EXTRAS[extra])
    assert how_to_install(package) == f'run: pip install "array-transformers[{extra}]"'


class OutOfMemoryErrorOfALibrary(RuntimeError):
    pass


OutOfMemoryErrorOfALibrary.__name__ = "OutOfMemoryError"  # as torch and cupy call theirs


@pytest.mark.parametrize(
    ("error", "memory"),
    [
        (MemoryError(), "memory"),
        (OutOfMemoryErrorOfALibrary("CUDA out of memory"), "GPU memory"),
        (RuntimeError("cublasGemmEx returned CUBLAS_STATUS_ALLOC_FAILED"), "GPU memory"),
        (RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 4 bytes."), "memory"),
        (RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory: you"), "memory"),
        (RuntimeError("can't start new thread"), "memory"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "memory"),
    ],
    ids=["numpy", "class", "cublas", "jax", "torch", "thread", "system"],
)
def test_out_of_memory_errors_of_all_libraries_are_recognized(error, memory):
    assert is_out_of_memory(error)
    with (
        pytest.raises(OutOfMemoryError, match=rf"^step 3 ran out of {memory}; lower batch_tokens$") as raised,
        out_of_memory("step 3", "lower batch_tokens"),
    ):
        raise error
    assert raised.value.__cause__ is error


def test_a_real_allocation_failure_is_translated():
    with pytest.raises(OutOfMemoryError), out_of_memory("it", "use less"):
        np.empty(2**58, dtype="uint8")


@pytest.mark.parametrize("error", [ValueError("memory"), RuntimeError("no"), OSError(errno.ENOSPC, "full")])
def test_other_errors_pass_through(error):
    assert not is_out_of_memory(error)
    with pytest.raises(type(error)) as raised, out_of_memory("it", "use less"):
        raise error
    assert raised.value is error
