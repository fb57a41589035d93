"""The namespace that the conformance suite runs on: every real floating array is tracked, every VJP runs at once.

The suite calls the functions of the standard with thousands of odd shapes, axes and dtypes, but never asks for a
gradient. Here each record that lands on the tape is pulled back immediately, and the cotangents must fit the inputs.
So the suite tests two things: that results are those of the library below, and that no derivative rule breaks on what
the standard allows. (That the derivatives are right is for tests/tracing.)
"""

from __future__ import annotations

import atexit
import functools
import os
from pathlib import Path
from typing import Any

import numpy as np

from xformer.backends import dtype_name, is_floating, resolve
from xformer.tracing.grad import unbroadcast
from xformer.tracing.namespace import GradTrace
from xformer.tracing.tracer import Tracer

# The file in which the number of derivatives that were run is left for run.py.
COUNT_FILE = os.environ.get("XFORMER_CONFORMANCE_COUNT")


class EagerTape(list[Any]):
    """A tape that pulls every record back when it is appended, and keeps only what later records need of it."""

    def __init__(self, base: Any) -> None:
        super().__init__()
        self.base = base
        self.executed = 0

    def append(self, record: Any) -> None:
        pull, parents, saved, shape, dtype = record
        if pull is not None and shape is not None:
            self.pull_back(pull, parents, saved, self.base.ones(shape, dtype=dtype))
        super().append((None, (), None, shape, dtype))

    def pull_back(self, pull: Any, parents: Any, saved: Any, g: Any) -> None:
        with np.errstate(all="ignore"):
            try:
                cotangents = list(pull(self.base, g, saved))
            except NotImplementedError:
                return  # refused, not wrong
        self.executed += 1
        for parent, cotangent in zip(parents, cotangents, strict=True):
            if parent >= 0 and cotangent is not None:
                _, _, _, shape, dtype = self[parent]
                fitted = unbroadcast(self.base, cotangent, tuple(shape), dtype)
                if tuple(fitted.shape) != tuple(shape) or fitted.dtype != dtype:
                    raise AssertionError(f"cotangent {cotangent.dtype}{cotangent.shape} for input {dtype}{shape}")


class TrackingNamespace(GradTrace):
    """A trace without end, in which every real floating array is an input."""

    def __init__(self, base: Any) -> None:
        super().__init__(base)
        self.tape = EagerTape(base)

    def _bind(self, name: str) -> Any:
        bound = super()._bind(name)
        if not callable(bound) or isinstance(bound, type):
            return bound

        @functools.wraps(bound)
        def call(*args: Any, **keywords: Any) -> Any:
            return self.track(bound(*args, **keywords))

        return call

    def read(self, x: Tracer, use: str) -> Any:
        """Let the suite read the numbers that it checks, which a trace refuses for arrays that have a derivative."""
        return super().read(x, use) if use == "np.asarray" else x._value

    def track(self, value: Any) -> Any:
        """Make constants inputs, also those in the tuples that some functions return."""
        if isinstance(value, tuple | list):
            for item in value:
                self.track(item)
        elif type(value) is Tracer and value._index < 0 and is_floating(value.dtype):
            value._index = self.leaves([value._value])[0]._index
        return value

    def record(self, output: Any, pull: Any, parents: Any, saved: Any) -> Tracer:
        # The suite mixes real and complex arrays; a training step that does so is refused by the real namespace.
        if dtype_name(output.dtype).startswith("complex"):
            return Tracer(output, self, -1)
        return super().record(output, pull, parents, saved)

    def record_outputs(self, outputs: Any, pull: Any, parents: Any, saved: Any) -> Any:
        self.tape.pull_back(pull, parents, saved, [self.base.ones_like(output) for output in outputs])
        return super().record_outputs(outputs, pull, parents, saved)


xp = TrackingNamespace(resolve(os.environ.get("XFORMER_CONFORMANCE_LIBRARY", "numpy")))


@atexit.register
def leave_count() -> None:
    if COUNT_FILE:
        Path(COUNT_FILE).write_text(str(xp.tape.executed), encoding="utf-8")
