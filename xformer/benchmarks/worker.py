"""The process of a contender: `python -m xformer.benchmarks.worker`.

The first line on standard input says what to make; each further line is a number, that of the step to take. Every
answer is one line of JSON on standard output; whatever libraries print goes to standard error.
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
from pathlib import Path
from typing import Any

from xformer.benchmarks.workload import Work
from xformer.errors import XformerError
from xformer.threads import disable_malloc_trim

_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def main() -> None:
    """Make the work, say so, then take steps until standard input ends."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def answer(value: Any) -> None:
        print(json.dumps(value), file=answers, flush=True)

    order = json.loads(sys.stdin.readline())
    _go_first()
    _keep_to(order["threads"])
    disable_malloc_trim()
    module, _, function = order["factory"].partition(":")
    work: Work = getattr(importlib.import_module(module), function)(order["settings"])
    with work.around():
        before = _forget_peak()
        first = work.digest(work.step(0))
        times = [_seconds(work, step, 1) for step in range(order["warm_up"])]
        repeats = math.ceil(order["least_seconds"] / min(times)) if times else 1
        answer({"facts": work.facts, "answer": first})
        for line in sys.stdin:
            seconds = _seconds(work, int(line), max(1, repeats))
            # With helpers at work, this process does not hold all of the memory.
            peak = None if _has_children() else _memory("VmHWM")
            answer((seconds, None if peak is None or before is None else peak - before))


def _seconds(work: Work, number: int, repeats: int) -> float:
    """How long a step takes, on average of so many."""
    start = time.perf_counter()
    for _ in range(repeats):
        work.step(number)
    return (time.perf_counter() - start) / repeats


def _go_first() -> None:
    """Where memory runs out, let the kernel end this process rather than another one's."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")


def _keep_to(threads: int) -> None:
    """Leave the process only so many cores, whatever its libraries would count."""
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        if threads < len(cores):
            os.sched_setaffinity(0, cores[:threads])


def _forget_peak() -> int | None:
    """Let the kernel forget the largest memory so far; returns the bytes in use now, None where nothing tells."""
    with contextlib.suppress(OSError):
        _RESET.write_text("5", encoding="ascii")
        return _memory("VmRSS")
    return None


def _has_children() -> bool:
    return any(path.read_text(encoding="ascii").split() for path in Path("/proc/self/task").glob("*/children"))


def _memory(name: str) -> int | None:
    """Bytes of resident memory: VmRSS now, VmHWM at most; None on a system that does not say."""
    try:
        found = re.search(rf"^{name}:\s+(\d+) kB", _STATUS.read_text(encoding="ascii"), re.MULTILINE)
    except OSError:
        return None
    return 1024 * int(found[1]) if found else None


if __name__ == "__main__":
    try:
        main()
    except XformerError as error:
        sys.exit(str(error))
