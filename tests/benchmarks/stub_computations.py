"""Computation for implementations of tests."""

from __future__ import annotations

import os
import time

from xformer.benchmarks import Computation
from xformer.errors import ConfigError


def sleep(settings):
    """Sleep settings["seconds"][index] seconds and return settings["result"]."""
    seconds = settings["seconds"]
    metadata = {"threads": os.environ["OMP_NUM_THREADS"], "cores": len(os.sched_getaffinity(0))}

    def step(index):
        time.sleep(seconds[index % len(seconds)])
        return settings.get("result", [])

    return Computation(step, list, metadata)


def allocate(settings):
    """Allocate and free settings["bytes"] bytes."""
    return Computation(lambda index: bytearray(b"x" * settings["bytes"])[-1], lambda result: [int(result)])


def print_first(settings):
    """Print to standard output, as some libraries do."""
    print("welcome")
    os.system("echo to you")
    return Computation(lambda index: print(index))


def refuse(settings):
    raise ConfigError("no such setting")


def fail(settings):
    raise RuntimeError("no compiler")


def die(settings):
    return Computation(lambda index: os._exit(3) if index == 1 else None)
