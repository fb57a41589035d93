"""Contenders that take turns: the one mechanism behind every comparison.

Times drift with whatever else a machine does, ratios of neighboring measurements much less. So all contenders are
there at once, each in a process of its own (worker.py), which keeps its thread pools and its memory out of the others'
way. Turn by turn, one after the other, they do the same work; whoever waits sleeps. What counts is the median, over
the turns, of the ratio of their times.
"""

from __future__ import annotations

import contextlib
import functools
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

from xformer.errors import BackendError, ConfigError
from xformer.threads import num_threads

_PAUSE_SECONDS = 0.3  # longer than idle threads of another contender spin before they sleep
_LEAST_SECONDS = 0.02  # of a turn; shorter work is repeated until it takes as long
_THREAD_VARIABLES = ("XFORMER_NUM_THREADS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
# How far answers may be from each other: of their size, and where they are small.
_TOLERANCES = {"float64": (2e-3, 2e-4), "float32": (2e-3, 2e-4), "float16": (1e-2, 5e-3), "bfloat16": (5e-2, 3e-2)}
DTYPES = tuple(_TOLERANCES)


@dataclass(frozen=True)
class Case:
    """A piece of work at one size, the same for every contender.

    name: how tables call it. settings: what factories are told, ready for JSON. tokens: of step n the n-th, in a
    circle. flops: floating-point operations of a step, in matrix products (0: not counted). warm_up: steps before
    the first turn.
    """

    name: str
    settings: dict[str, Any]
    tokens: Sequence[int]
    flops: int = 0
    warm_up: int = 3


@dataclass(frozen=True)
class Entry:
    """Who takes part.

    factory: "module:function", which makes a Work of the settings of the case and these. optional: the race goes on
    without it where it cannot start. checked: its answer must be that of the first contender; otherwise, how much of
    it is alike is measured. environment: variables that its process is given.
    """

    name: str
    factory: str
    settings: dict[str, Any] = field(default_factory=dict)
    optional: bool = False
    checked: bool = True
    environment: dict[str, str] = field(default_factory=dict)


def dtype_of(settings: dict[str, Any]) -> str:
    """The dtype that settings name, or the usual one."""
    return str(settings.get("dtype", "float32"))


def in_dtype(name: str, settings: dict[str, Any]) -> str:
    """The name of a case, with the dtype where it is not the usual one."""
    dtype = dtype_of(settings)
    return name if dtype == "float32" else f"{name}, {dtype}"


class Contender:
    """One side, in a process of its own; raises BackendError, with the last line of its errors, where it ends.

    Made, it begins to prepare itself; `wait` until it is ready.
    """

    def __init__(self, entry: Entry, case: Case, threads: int) -> None:
        self.name = entry.name
        path = os.pathsep.join(place or os.getcwd() for place in sys.path)
        limits = dict.fromkeys(_THREAD_VARIABLES, str(threads))
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        self._process: Any = subprocess.Popen(
            [sys.executable, "-m", "xformer.benchmarks.worker"],
            env={**os.environ, **limits, **entry.environment, "PYTHONPATH": path},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )
        self.facts: dict[str, Any] = {}
        self.answer: list[Any] = []
        self.agreement: float | None = None  # the share of its answer that is alike, where not all must be
        self.seconds: list[float] = []
        self.peak_bytes: int | None = None
        order = {
            "factory": entry.factory,
            "settings": {**case.settings, **entry.settings},
            "threads": threads,
            "warm_up": case.warm_up,
            "least_seconds": _LEAST_SECONDS if len(case.tokens) == 1 else 0.0,
        }
        self._tell(order)

    def wait(self) -> None:
        """Until it has done the work for the first times."""
        made = self._hear()
        self.facts, self.answer = made["facts"], made["answer"]

    def step(self, number: int) -> float:
        """Do the work number `number`; returns its seconds."""
        time.sleep(_PAUSE_SECONDS)
        self._tell(number)
        seconds, self.peak_bytes = self._hear()
        self.seconds.append(seconds)
        return float(seconds)

    def dismiss(self) -> None:
        """Let the process end."""
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()

    def close(self) -> None:
        """End the process."""
        self.dismiss()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._errors.close()

    def _tell(self, what: Any) -> None:
        with contextlib.suppress(BrokenPipeError):  # then the answer is empty, and says why
            print(json.dumps(what), file=self._process.stdin, flush=True)

    def _hear(self) -> Any:
        line = self._process.stdout.readline()
        if not line:
            raise BackendError(f"{self.name} cannot take part: {self._last_words()}")
        return json.loads(line)

    def _last_words(self) -> str:
        code = self._process.wait()
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").split("\n")
        said = [line.strip() for line in lines if line.strip()]
        return said[-1] if said and code > 0 else f"its process ended with code {code}"


class Race:
    """The contenders of a case, and what was measured so far; the first contender is the one ratios refer to."""

    def __init__(self, case: Case, contenders: Sequence[Contender], absent: dict[str, str]) -> None:
        self.case, self.contenders, self.absent = case, contenders, absent
        self.turns = 0

    def turn(self) -> None:
        """One step of every contender; who begins changes from turn to turn."""
        first = self.turns % len(self.contenders)
        for contender in (*self.contenders[first:], *self.contenders[:first]):
            contender.step(self.turns)
        self.turns += 1

    def result(self) -> dict[str, Any]:
        """What was measured, ready for JSON: times in seconds, ratios above 1 where the first contender is faster."""
        case = self.case
        tokens = sum(case.tokens[turn % len(case.tokens)] for turn in range(self.turns))
        sizes = {name: value for name, value in case.settings.items() if isinstance(value, int | float | str)}
        return {
            "case": case.name,
            "sizes": sizes,
            "turns": self.turns,
            "contenders": [self._figures(contender, tokens) for contender in self.contenders],
            "absent": self.absent,
        }

    def _figures(self, contender: Contender, tokens: int) -> dict[str, Any]:
        ratios = [theirs / ours for theirs, ours in zip(contender.seconds, self.contenders[0].seconds, strict=True)]
        seconds = statistics.median(contender.seconds)
        # Where steps differ in size, their median is that of no size in particular.
        mean = sum(contender.seconds) / self.turns if len(self.case.tokens) > 1 else seconds
        return {
            "name": contender.name,
            "seconds": seconds,
            "seconds_quartiles": quartiles(contender.seconds),
            "tokens_per_second": tokens / self.turns / mean,
            "flops_per_second": self.case.flops / seconds,
            "peak_bytes": contender.peak_bytes,
            "ratio": statistics.median(ratios),
            "ratio_quartiles": quartiles(ratios),
            "agreement": contender.agreement,
            "facts": contender.facts,
        }


def quartiles(values: Sequence[float]) -> list[float]:
    """The first and the third quartile; of a single value, that value twice."""
    if len(values) < 2:
        return [values[0], values[0]]
    first, _, third = statistics.quantiles(values, n=4, method="inclusive")
    return [first, third]


@contextlib.contextmanager
def racing(
    case: Case, entries: Sequence[Entry], threads: int | None = None, *, together: bool = False
) -> Iterator[Race]:
    """Start all contenders of a case, see that they answer alike, and end them after the block.

    threads: of each contender; default those that this process may use. together: start them all at once. Raises
    BackendError where one that is not optional cannot start, or where none can; ConfigError where one answers
    differently.
    """
    with contextlib.ExitStack() as stack:
        started: list[Contender] = []
        absent: dict[str, str] = {}

        def begin(entry: Entry) -> Contender:
            contender = Contender(entry, case, threads or num_threads())
            stack.callback(contender.close)
            return contender

        begun: Iterable[Contender] = map(begin, entries)
        for entry, contender in zip(entries, list(begun) if together else begun, strict=True):
            try:
                contender.wait()
            except BackendError as error:
                if not entry.optional:
                    raise
                absent[entry.name] = str(error)
                continue
            started.append(contender)
            if entry.checked:
                _check(case, started[0], contender)
            else:
                contender.agreement = _agreement(case, started[0].answer, contender.answer)
        if not started:
            raise BackendError(f"{case.name}: no contender can start: {'; '.join(absent.values())}")
        yield Race(case, started, absent)
        for contender in started:  # all at the same time
            contender.dismiss()


def _check(case: Case, first: Contender, other: Contender) -> None:
    """Raise ConfigError unless two contenders computed the same."""
    if not first.answer or not other.answer:
        return  # one that draws its own random numbers has no answer to compare
    alike = functools.partial(_alike, *_tolerances(case))
    if len(first.answer) != len(other.answer) or not all(map(alike, first.answer, other.answer)):
        pairs = zip(first.answer, other.answer, strict=False)
        example = next((pair for pair in pairs if not alike(*pair)), (len(first.answer), len(other.answer)))
        raise ConfigError(
            f"{case.name}: {other.name} computes {example[1]!r} where {first.name} computes {example[0]!r}; "
            "what computes different things cannot be compared"
        )


def _agreement(case: Case, answer: list[Any], other: list[Any]) -> float:
    alike = sum(map(functools.partial(_alike, *_tolerances(case)), answer, other))
    return alike / max(1, len(answer), len(other))


def _tolerances(case: Case) -> tuple[float, float]:
    return _TOLERANCES[dtype_of(case.settings)]


def _alike(relative: float, absolute: float, a: Any, b: Any) -> bool:
    """Token ids must be equal, floating-point numbers nearly."""
    if isinstance(a, float) and isinstance(b, float):
        return math.isclose(a, b, rel_tol=relative, abs_tol=absolute)
    return bool(a == b)
