"""Out-of-memory errors of every library as one `OutOfMemoryError`."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator

from xformer.errors import OutOfMemoryError

# Raised as RuntimeError by jax, by torch on a CPU, and by Python.
_MESSAGES = ("RESOURCE_EXHAUSTED", "can't allocate memory", "can't start new thread")


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error of any library says that memory ran out."""
    return (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"
        or (isinstance(error, OSError) and error.errno == errno.ENOMEM)
        or any(message in str(error) for message in _MESSAGES)
    )


@contextlib.contextmanager
def out_of_memory(operation: str, suggestion: str) -> Iterator[None]:
    """Turn an out-of-memory error inside the block into an OutOfMemoryError that names the operation."""
    try:
        yield
    except (MemoryError, RuntimeError, OSError) as error:
        if not is_out_of_memory(error):
            raise
        raise OutOfMemoryError(f"{operation} ran out of memory; {suggestion}") from error
