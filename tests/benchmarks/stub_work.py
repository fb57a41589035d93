"""Work for contenders of tests."""

from __future__ import annotations

import os
import time

from xformer.benchmarks import Work
from xformer.errors import ConfigError


def sleep(settings):
    """Takes settings["seconds"], which depend on the step, and answers with settings["answer"]."""
    seconds = settings["seconds"]
    facts = {"threads": os.environ["OMP_NUM_THREADS"], "cores": len(os.sched_getaffinity(0))}

    def step(number):
        time.sleep(seconds[number % len(seconds)])
        return settings.get("answer", [])

    return Work(step, list, facts)


def allocate(settings):
    """Touches so many bytes, and lets them go again."""
    return Work(lambda number: bytearray(b"x" * settings["bytes"])[-1], lambda result: [int(result)])


def print_first(settings):
    """A library that greets on standard output."""
    print("welcome")
    os.system("echo to you")
    return Work(lambda number: print(number))


def refuse(settings):
    raise ConfigError("no such setting")


def fail(settings):
    raise RuntimeError("no compiler")


def die(settings):
    return Work(lambda number: os._exit(3) if number == 1 else None)
