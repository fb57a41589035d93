"""The process of an implementation: `python -m xformer.benchmarks.worker`.

The first line on standard input describes the computation; each further line is the index of the step to run. Every
reply is one line of JSON on standard output. Output of libraries goes to standard error.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import os
import re
import sys
import time
import warnings
from pathlib import Path
from typing import Any

from xformer.benchmarks.computation import Computation
from xformer.errors import XformerError
from xformer.ops import explain
from xformer.threads import disable_malloc_trim

_STATUS, _CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def main() -> None:
    """Build the computation, reply, then run steps until standard input ends."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def reply(value: Any) -> None:
        print(json.dumps(value), file=replies, flush=True)

    request = json.loads(sys.stdin.readline())
    with contextlib.suppress(OSError):  # the kernel kills this process first if memory runs out
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
    if hasattr(os, "sched_setaffinity"):  # whatever numbers of threads its libraries choose
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: request["threads"]])
    disable_malloc_trim()
    module, _, function = request["factory"].partition(":")
    computation: Computation = getattr(importlib.import_module(module), function)(request["settings"])
    fingerprint: list[Any] = []
    with computation.context():
        start_bytes = reset_peak_memory()
        with warnings.catch_warnings(record=True) as caught:
            kernels = explain(lambda: fingerprint.extend(computation.fingerprint(computation.step(0))))
            times = [duration(computation, index, 1) for index in range(request["warmup_steps"])]
        repeats = math.ceil(request["min_seconds"] / min(times)) if times else 1
        facts = {
            "kernels": [line for line in kernels.splitlines() if not line.startswith(" ")],
            "warnings": sorted({str(warning.message) for warning in caught}),
        }
        metadata = {**computation.metadata, **{name: lines for name, lines in facts.items() if lines}}
        reply({"metadata": metadata, "fingerprint": fingerprint})
        for line in sys.stdin:
            seconds = duration(computation, int(line), max(1, repeats))
            synchronous = duration(computation, int(line), 1) if computation.wait else None
            peak_bytes = resident_memory("VmHWM")
            grown = None if peak_bytes is None or start_bytes is None else peak_bytes - start_bytes
            reply((seconds, synchronous, grown))


def duration(computation: Computation, index: int, repeats: int) -> float:
    """Return the mean duration of a step; on a GPU, only the last step is waited for."""
    start = time.perf_counter()
    for _ in range(repeats - 1):
        computation.step(index)
    result = computation.step(index)
    if computation.wait:
        computation.wait(result)
    return (time.perf_counter() - start) / repeats


def reset_peak_memory() -> int | None:
    """Reset the peak of resident memory; return the bytes in use, or None if the system does not report them."""
    with contextlib.suppress(OSError):
        _CLEAR_REFS.write_text("5", encoding="ascii")
        return resident_memory("VmRSS")
    return None


def resident_memory(name: str) -> int | None:
    """Return the resident memory in bytes (VmRSS now, VmHWM peak), or None if the system does not report it."""
    try:
        match = re.search(rf"^{name}:\s+(\d+) kB", _STATUS.read_text(encoding="ascii"), re.MULTILINE)
    except OSError:
        return None
    return 1024 * int(match[1]) if match else None


if __name__ == "__main__":
    try:
        main()
    except XformerError as error:
        sys.exit(str(error))
