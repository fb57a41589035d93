"""Running out of memory: whatever a library calls it, how much was asked for, and how much is free."""

from __future__ import annotations

import contextlib
import errno
import importlib
import importlib.util
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from xformer.errors import OutOfMemoryError

resource: Any = importlib.import_module("resource") if importlib.util.find_spec("resource") else None  # not on Windows
_UNITS = {"bytes": 0, "KiB": 1, "MiB": 2, "GiB": 3, "TiB": 4, "PiB": 5}
_AMOUNT = re.compile(rf"(\d[\d.,]*) ({'|'.join(_UNITS)})")
# By torch on a CPU, by jax, and by CUDA and its libraries.
_SAID = ("can't allocate memory", "RESOURCE_EXHAUSTED", "_STATUS_ALLOC_FAILED", "cudaErrorMemoryAllocation")


def shortage(error: BaseException) -> str | None:
    """What an error says of memory, as a phrase; None where it is about something else."""
    text = str(error)
    ran_out = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    ran_out = ran_out or (isinstance(error, OSError) and error.errno == errno.ENOMEM)
    if not ran_out and not any(said in text for said in _SAID):
        return None
    found = _AMOUNT.search(text)
    place, free = _free(error, text)
    left = "" if free is None else f", and {_in_units(free)} is free {place}"
    if found is None:
        return f"more was asked for than there is{left}"
    return f"{_in_units(float(found[1].replace(',', '')) * 1024 ** _UNITS[found[2]])} was asked for{left}"


@contextlib.contextmanager
def enough_memory(what: str, advice: Callable[[], str]) -> Iterator[None]:
    """Raise OutOfMemoryError, which says what ran out and gives advice, where a library runs out of memory inside."""
    try:
        yield
    except (MemoryError, RuntimeError, OSError) as error:
        short = shortage(error)
        if short is None:
            raise
        raise OutOfMemoryError(f"{what} ran out of memory: {short}; {advice()}") from error


def _free(error: BaseException, text: str) -> tuple[str, float | None]:
    """Where the memory is that ran out, and how many bytes are free there."""
    name = type(error).__module__.split(".")[0]
    with contextlib.suppress(Exception):  # a GPU in trouble may answer nothing
        if name == "cupy":
            cupy: Any = sys.modules["cupy"]
            return "on the GPU", cupy.cuda.runtime.memGetInfo()[0] + cupy.get_default_memory_pool().free_bytes()
        if name == "torch" and "GPU" in text:
            return "on the GPU", sys.modules["torch"].cuda.mem_get_info()[0]
    if name in ("cupy", "jax", "jaxlib") or "GPU" in text:
        return "", None
    limit = resource.getrlimit(resource.RLIMIT_AS)[0] if resource else -1
    with contextlib.suppress(OSError, AttributeError):
        if limit >= 0:
            pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
            return "under this process's limit (ulimit -v)", max(0.0, limit - 4096.0 * pages)
        told = re.search(r"^MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(encoding="ascii"), re.MULTILINE)
        return "on this machine", 1024.0 * int(told[1])  # type: ignore[index]
    return "", None


def _in_units(count: float) -> str:
    unit = max(place for place in _UNITS.values() if place == 0 or count >= 1024**place)
    return f"{count / 1024**unit:.{1 if unit else 0}f} {list(_UNITS)[unit]}"
