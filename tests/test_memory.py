import errno

import numpy as np
import pytest

from xformer.errors import OutOfMemoryError
from xformer.memory import is_out_of_memory, out_of_memory


class OutOfMemoryErrorOfALibrary(RuntimeError):
    pass


OutOfMemoryErrorOfALibrary.__name__ = "OutOfMemoryError"  # as torch and cupy call theirs


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        OutOfMemoryErrorOfALibrary("CUDA out of memory"),
        RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 4 bytes."),
        RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory: you tried to"),
        RuntimeError("can't start new thread"),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
    ],
    ids=["numpy", "class", "jax", "torch", "thread", "system"],
)
def test_out_of_memory_errors_of_all_libraries_are_recognized(error):
    assert is_out_of_memory(error)
    with (
        pytest.raises(OutOfMemoryError, match=r"^step 3 ran out of memory; lower batch_tokens$") as raised,
        out_of_memory("step 3", "lower batch_tokens"),
    ):
        raise error
    assert raised.value.__cause__ is error


def test_a_real_one():
    with pytest.raises(OutOfMemoryError), out_of_memory("it", "use less"):
        np.empty(2**58, dtype="uint8")


@pytest.mark.parametrize("error", [ValueError("memory"), RuntimeError("no"), OSError(errno.ENOSPC, "full")])
def test_other_errors_pass_through(error):
    assert not is_out_of_memory(error)
    with pytest.raises(type(error)) as raised, out_of_memory("it", "use less"):
        raise error
    assert raised.value is error
