"""Computation for implementations of tests."""

from __future__ import annotations

import os
import time
import warnings

import numpy as np

from xformer.benchmarks.computation import Computation
from xformer.errors import ConfigError
from xformer.ops import softmax


def sleep(settings):
    """Sleep settings["seconds"][index] seconds and return settings["result"]."""
    seconds = settings["seconds"]
    metadata = {"threads": os.environ["OMP_NUM_THREADS"], "cores": 1}
    if hasattr(os, "sched_getaffinity"):  # other systems do not restrict the cores
        metadata["cores"] = len(os.sched_getaffinity(0))

    def step(index):
        time.sleep(seconds[index % len(seconds)])
        return settings.get("result", [])

    return Computation(step, list, metadata, wait=(lambda result: None) if settings.get("waits") else None)


def allocate(settings):
    """Allocate and free settings["bytes"] bytes."""
    return Computation(lambda index: bytearray(b"x" * settings["bytes"])[-1], lambda result: [int(result)])


def warn(settings):
    """Warn, and run an operation that has kernels."""

    def step(index):
        warnings.warn("a slower kernel runs instead", RuntimeWarning, stacklevel=1)
        return softmax(np.zeros((2, 3)))

    return Computation(step)


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
