"""The array library of a process that trains, or that serves the command line."""

from __future__ import annotations

from typing import Any

from xformer.backends import resolve
from xformer.errors import BackendError
from xformer.native import is_reproducible, use_reproducible_on
from xformer.ops.operation import load_kernels
from xformer.threads import disable_malloc_trim, num_threads


def open_backend(name: Any, dtype: str | None = None) -> Any:
    """Return the namespace of an array library and prepare the process for computing with it.

    Args:
        name: The library, as a module or by name.
        dtype: Data type of the model, if known.

    Raises:
        BackendError: If the library is unknown, not installed, or finds no device.
        ConfigError: If XFORMER_KERNELS, XFORMER_CHECK_KERNELS or XFORMER_NUM_THREADS is invalid, or this process uses
            reproducible algorithms, which the library or the dtype has not.
    """
    xp = resolve(name)
    if is_reproducible():
        use_reproducible_on(xp.name, dtype)
    disable_malloc_trim()
    xp.configure(dtype=dtype, num_threads=num_threads())
    try:
        xp.zeros(1, dtype=xp.float32)
    except (RuntimeError, OSError) as error:
        # A library without a usable device fails at the first array.
        reason = " ".join(str(error).split())
        raise BackendError(f"backend {name!r} is installed but cannot compute here: {reason}") from error
    load_kernels(xp.name)
    return xp
