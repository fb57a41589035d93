"""Running out of memory: whatever a library calls it, how much was asked for, and how much is free."""

from __future__ import annotations

import contextlib
import errno
import importlib
import importlib.util
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from xformer.errors import OutOfMemoryError

resource: Any = (
    importlib.import_module("resource") if importlib.util.find_spec("resource") else None
)  # not on TextChunks
_UNITS = {"bytes": 0, "KiB": 1, "MiB": 2, "GiB": 3, "TiB": 4, "PiB": 5}
_AMOUNT = re.compile(rf"(\d[\d.,]*) ({'|'.join(_UNITS)})")
# By torch on a CPU, by jax, by CUDA and its libraries, and by who loads a library.
_SAID = (
    "can't allocate memory", "RESOURCE_EXHAUSTED", "_STATUS_ALLOC_FAILED", "cudaErrorMemoryAllocation",
    "failed to map segment",
)  # fmt: skip
_NO_THREAD = "can't start new thread"


class _Place(NamedTuple):
    """Where memory ran out, and how many bytes are free there and held by this process; None: nobody knows."""

    name: str
    free: float | None
    held: float = 0.0


def shortage(error: BaseException) -> str | None:
    """What an error says of memory, as a phrase; None where it is about something else."""
    text = str(error)
    if _NO_THREAD in text:
        return "no thread could be started, for want of memory or by a limit on threads"
    if isinstance(error, OSError) and error.errno is None:
        text += f" {error.__context__}"  # llvmlite leaves the reason why it did not load to the error before its own
    said = next((words for words in _SAID if words in text), None)
    ran_out = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    ran_out = ran_out or (isinstance(error, OSError) and error.errno == errno.ENOMEM)
    if not ran_out and said is None:
        return None
    found = _AMOUNT.search(text)
    place = _place(error)
    left = "" if place.free is None else f", and {in_units(place.free)} is free {place.name}"
    if found is None:
        return f"more was asked for than there is{f' ({said})' if said else ''}{left}"
    return f"{in_units(float(found[1].replace(',', '')) * 1024 ** _UNITS[found[2]])} was asked for{left}"


@contextlib.contextmanager
def enough_memory(what: str, advice: Callable[[float | None], str]) -> Iterator[None]:
    """Raise OutOfMemoryError, which says what ran out and gives advice, where a library runs out of memory inside.

    advice: is told how many bytes this process could have there at most, or None.
    """
    try:
        yield
    except (MemoryError, RuntimeError, OSError) as error:
        short = shortage(error)
        if short is None:
            raise
        place = _place(error)
        most = None if place.free is None else place.free + place.held
        raise OutOfMemoryError(f"{what} ran out of memory: {short}; {advice(most)}") from error


def _place(error: BaseException) -> _Place:
    text, name = str(error), type(error).__module__.split(".")[0]
    with contextlib.suppress(Exception):  # a GPU in trouble may answer nothing
        if name == "cupy":
            cupy: Any = sys.modules["cupy"]
            pool = cupy.get_default_memory_pool()
            return _Place("on the GPU", cupy.cuda.runtime.memGetInfo()[0] + pool.free_bytes(), pool.used_bytes())
        if name == "torch" and "GPU" in text:
            cuda: Any = sys.modules["torch"].cuda
            return _Place("on the GPU", cuda.mem_get_info()[0], cuda.memory_reserved())
    if name in ("cupy", "jax", "jaxlib") or "GPU" in text:
        return _Place("", None)
    limit = resource.getrlimit(resource.RLIMIT_AS)[0] if resource else -1
    with contextlib.suppress(OSError, AttributeError, MemoryError):
        pages = Path("/proc/self/statm").read_text(encoding="ascii").split()
        size, resident, data = (float(os.sysconf("SC_PAGE_SIZE")) * int(pages[column]) for column in (0, 1, 5))
        if limit >= 0:
            return _Place("under this process's limit (ulimit -v)", max(0.0, limit - size), data)
        told = re.search(r"^MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(encoding="ascii"), re.MULTILINE)
        return _Place("on this machine", 1024.0 * int(told[1]), resident)  # type: ignore[index]
    return _Place("", None)


def in_units(count: float) -> str:
    """Say a number of bytes.

    >>> in_units(3 * 2**29)
    '1.5 GiB'
    """
    unit = max(place for place in _UNITS.values() if place == 0 or count >= 1024**place)
    return f"{count / 1024**unit:.{1 if unit else 0}f} {list(_UNITS)[unit]}"
