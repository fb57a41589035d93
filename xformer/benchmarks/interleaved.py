"""Interleaved benchmarks: several implementations of one workload, measured in turns.

Absolute times drift with the load of a machine; ratios of neighboring measurements drift much less. Every
implementation therefore runs in a separate process (worker.py), with separate thread pools and memory. In each round
they compute the same step one after another while the others sleep. The result is the median, over the rounds, of the
ratio of their times.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from xformer.errors import BackendError
from xformer.threads import num_threads

_PAUSE_SECONDS = 0.3  # longer than idle threads of another implementation spin before they sleep
_MIN_SECONDS = 0.02  # shorter steps are repeated until a round takes this long
_THREAD_VARIABLES = ("XFORMER_NUM_THREADS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
# Larger differences of results from those of the first implementation are reported.
_TOLERANCES = {"float64": 1e-3, "float32": 1e-3, "float16": 5e-3, "bfloat16": 2e-2}
DTYPES = tuple(_TOLERANCES)
Settings = dict[str, Any]


@dataclass(frozen=True)
class Workload:
    """A computation at one size, the same for every implementation.

    Args:
        name: Name in tables.
        settings: Passed to the factories; must be representable as JSON.
        tokens: Number of tokens of each step; step n processes `tokens[n % len(tokens)]`.
        flops: Floating-point operations of the matrix products in a step; 0 if unknown.
        warmup_steps: Number of steps before the first round.
    """

    name: str
    settings: dict[str, Any]
    tokens: Sequence[int]
    flops: int = 0
    warmup_steps: int = 3


@dataclass(frozen=True)
class Spec:
    """Description of an implementation to start.

    Args:
        name: Name in tables.
        factory: "module:function"; the function gets the settings and returns a Computation.
        settings: Added to the settings of the workload.
        optional: Continue without the implementation if it cannot start.
        environment: Environment variables of the process.
    """

    name: str
    factory: str
    settings: dict[str, Any] = field(default_factory=dict)
    optional: bool = False
    environment: dict[str, str] = field(default_factory=dict)


def dtype_of(settings: dict[str, Any]) -> str:
    """Return the dtype in the settings; the default is float32."""
    return str(settings.get("dtype", "float32"))


def name_with_dtype(name: str, settings: dict[str, Any]) -> str:
    """Append the dtype to the name of a workload unless it is float32."""
    dtype = dtype_of(settings)
    return name if dtype == "float32" else f"{name}, {dtype}"


class Implementation:
    """An implementation of a workload, running in a separate process.

    The constructor starts the process; `wait` blocks until it is ready. Every method raises BackendError, with the last
    line of standard error, if the process has exited.
    """

    def __init__(self, spec: Spec, workload: Workload, threads: int) -> None:
        self.name = spec.name
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        limits = dict.fromkeys(_THREAD_VARIABLES, str(threads))
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        self._process: Any = subprocess.Popen(
            [sys.executable, "-m", "xformer.benchmarks.worker"],
            env={**os.environ, **limits, **spec.environment, "PYTHONPATH": path},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            encoding="utf-8",
        )
        self.metadata: dict[str, Any] = {}
        self.fingerprint: list[list[Any]] = []
        self.seconds: list[float] = []
        self.synchronous_seconds: list[float] = []  # on a GPU: of a single step, including the wait for its result
        self.peak_bytes: int | None = None
        request = {"factory": spec.factory, "settings": {**workload.settings, **spec.settings}, "threads": threads}
        least = _MIN_SECONDS if len(workload.tokens) == 1 else 0.0
        self._send({**request, "warmup_steps": workload.warmup_steps, "min_seconds": least})

    def wait(self) -> None:
        """Block until the warm-up steps are done."""
        reply = self._receive()
        self.metadata, self.fingerprint = reply["metadata"], reply["fingerprint"]

    def step(self, index: int) -> float:
        """Run the step with this index, several times if it is short, and return its duration in seconds."""
        time.sleep(_PAUSE_SECONDS)
        self._send(index)
        seconds, synchronous, self.peak_bytes = self._receive()
        self.seconds.append(seconds)
        self.synchronous_seconds += [] if synchronous is None else [synchronous]
        return float(seconds)

    def request_exit(self) -> None:
        """Ask the process to exit."""
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()

    def __enter__(self) -> Implementation:
        return self

    def __exit__(self, error_type: type[BaseException] | None, *_: Any) -> None:
        """Stop the process; after an error without waiting for its current step."""
        self.request_exit()
        try:
            self._process.wait(timeout=10.0 if error_type is None else 0.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._stderr.close()

    def _send(self, message: Any) -> None:
        with contextlib.suppress(BrokenPipeError):  # _receive then reports why the process has exited
            print(json.dumps(message), file=self._process.stdin, flush=True)

    def _receive(self) -> Any:
        line = self._process.stdout.readline()
        if not line:
            raise self._failure()
        return json.loads(line)

    def _failure(self) -> BackendError:
        """Return an error with the last line of standard error, and all of it as a note."""
        code = self._process.wait()
        self._stderr.seek(0)
        stderr = self._stderr.read().decode(errors="replace")
        messages = [line.strip() for line in stderr.split("\n") if line.strip()]
        message = messages[-1] if messages and code > 0 else f"its process exited with code {code}"
        error = BackendError(f"{self.name} failed: {message}")
        error.add_note(stderr)
        return error


class InterleavedBenchmark:
    """The running implementations of a workload and their measurements; ratios refer to the first implementation."""

    def __init__(self, workload: Workload, implementations: list[Implementation], unavailable: dict[str, str]) -> None:
        self.workload, self.implementations, self.unavailable = workload, implementations, unavailable
        self.rounds = 0

    def run_round(self) -> None:
        """Run one step of every implementation; each round starts with another one."""
        first = self.rounds % len(self.implementations)
        for implementation in (*self.implementations[first:], *self.implementations[:first]):
            implementation.step(self.rounds)
        self.rounds += 1

    def result(self) -> dict[str, Any]:
        """Return the measurements as JSON data: seconds, and ratios above 1 if the first implementation is faster."""
        workload = self.workload
        tokens = sum(workload.tokens[index % len(workload.tokens)] for index in range(self.rounds))
        sizes = {name: value for name, value in workload.settings.items() if isinstance(value, int | float | str)}
        return {
            "workload": workload.name,
            "sizes": sizes,
            "rounds": self.rounds,
            "implementations": [self._measurements(each, tokens) for each in self.implementations],
            "unavailable": self.unavailable,
        }

    def _measurements(self, implementation: Implementation, tokens: int) -> dict[str, Any]:
        baseline = self.implementations[0].seconds
        ratios = [seconds / reference for seconds, reference in zip(implementation.seconds, baseline, strict=True)]
        median = statistics.median(implementation.seconds)
        # The median of steps of different sizes does not belong to any of these sizes, so use the mean.
        mean = sum(implementation.seconds) / self.rounds if len(self.workload.tokens) > 1 else median
        synchronous = implementation.synchronous_seconds
        distance = None
        if implementation is not self.implementations[0]:
            distance = difference(self.implementations[0].fingerprint, implementation.fingerprint)
        return {
            "name": implementation.name,
            "seconds": median,
            "seconds_quartiles": quartiles(implementation.seconds),
            "synchronous_seconds": statistics.median(synchronous) if synchronous else None,
            "tokens_per_second": tokens / self.rounds / mean,
            "flops_per_second": self.workload.flops / median,
            "peak_bytes": implementation.peak_bytes,
            "ratio": statistics.median(ratios),
            "ratio_quartiles": quartiles(ratios),
            "difference": distance,
            "differs": distance is not None and distance > _TOLERANCES[dtype_of(self.workload.settings)],
            "metadata": implementation.metadata,
        }


def quartiles(values: Sequence[float]) -> list[float]:
    """Return the first and the third quartile; for a single value, that value twice."""
    return [float(value) for value in np.quantile(values, (0.25, 0.75))]


@contextlib.contextmanager
def interleaved_benchmark(
    workload: Workload, specs: Sequence[Spec], threads: int | None = None, *, start_together: bool = False
) -> Iterator[InterleavedBenchmark]:
    """Start all implementations of a workload; stop them on exit.

    Args:
        workload: The workload to measure.
        specs: The implementations; the first one is the reference.
        threads: Threads of each implementation; the default is all that this process may use.
        start_together: Start all implementations at the same time.

    Yields:
        The benchmark; call `run_round` any number of times, then `result`.

    Raises:
        BackendError: If an implementation that is not optional cannot start, or none can.
    """
    with contextlib.ExitStack() as stack:
        ready: list[Implementation] = []
        unavailable: dict[str, str] = {}

        def start(spec: Spec) -> Implementation:
            return stack.enter_context(Implementation(spec, workload, threads or num_threads()))

        started: Iterable[Implementation] = map(start, specs)
        for spec, implementation in zip(specs, list(started) if start_together else started, strict=True):
            try:
                implementation.wait()
            except BackendError as error:
                if not spec.optional:
                    raise
                unavailable[spec.name] = str(error)
                continue
            ready.append(implementation)
        if not ready:
            raise BackendError(f"{workload.name}: no implementation can start: {'; '.join(unavailable.values())}")
        yield InterleavedBenchmark(workload, ready, unavailable)
        for implementation in ready:  # so that they exit at the same time
            implementation.request_exit()


def difference(expected: list[list[Any]], actual: list[list[Any]]) -> float | None:
    """Return by how much two fingerprints differ, or None if one of them is empty.

    This is the largest norm(expected - actual) / norm(expected) of all arrays; of arrays of integers, such as token
    ids, the share that differs. Arrays of different sizes, and NaN, count as 1.
    """
    if not expected or not actual:
        return None
    if [*map(len, expected)] != [*map(len, actual)]:
        return 1.0
    return max(map(_array_difference, expected, actual))


def _array_difference(expected: list[Any], actual: list[Any]) -> float:
    a, b = np.asarray(expected), np.asarray(actual)
    if a.dtype.kind == b.dtype.kind == "i":
        return float(np.mean(a != b))
    distance = float(np.linalg.norm(a - b)) / (float(np.linalg.norm(a)) or 1.0)
    return distance if math.isfinite(distance) else 1.0
