"""Options, limits and mutations of the stress tests, which `nox -s stress` runs."""

from __future__ import annotations

import contextlib
import copy
import json
import resource
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st

from xformer.errors import XformerError

SECONDS = 20  # for one case, many times longer than the slowest one takes
MEMORY = 2 << 30  # bytes that one case may add to the address space
MESSAGE = 1000  # characters of an error

# Largest errors of operations by name, direction, library and dtype; see test_numerics.py.
LARGEST_ERRORS: dict[tuple[str, str, str, str], float] = {}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="run ten times as many cases")


def pytest_configure(config: pytest.Config) -> None:
    scale = 10 if config.getoption("--long") else 1
    settings.register_profile(
        "stress",
        deadline=None,
        derandomize=config.getoption("--hypothesis-seed") is None,  # the same cases in every run
        database=None,
        max_examples=100 * scale,
        phases=(Phase.explicit, Phase.generate),  # shrinking takes longer than reading the failure
        suppress_health_check=list(HealthCheck),
        print_blob=False,
    )
    settings.load_profile("stress")


@pytest.fixture(scope="session")
def scale(request: pytest.FixtureRequest) -> int:
    """Return the factor of the number of cases."""
    return 10 if request.config.getoption("--long") else 1


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the largest error of each operation in any library as a table."""
    dtypes = ("float64", "float32", "float16", "bfloat16")
    names = sorted({key[:2] for key in LARGEST_ERRORS})
    if names:
        terminalreporter.write_line(f"| operation | | {' | '.join(dtypes)} |")
        terminalreporter.write_line("|---" * (2 + len(dtypes)) + "|")
    for name in names:
        errors = (
            [error for key, error in LARGEST_ERRORS.items() if key[:2] + key[3:] == (*name, dtype)] for dtype in dtypes
        )
        cells = (f"{max(each):.0e}" if each else "-" for each in errors)
        terminalreporter.write_line(f"| {' | '.join((*name, *cells))} |")


class LimitExceeded(BaseException):
    """A case took too long; not an Exception, so that no handler catches it."""


@contextlib.contextmanager
def limits(seconds: int = SECONDS, memory: int = MEMORY) -> Iterator[None]:
    """Fail if the block takes longer than `seconds` of the processor, or `memory` bytes more than the process has now.

    As other processes may take most of the processor, a block that waits may take 30 times as long.
    """

    def stop(*_: Any) -> None:
        raise LimitExceeded

    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    old = resource.getrlimit(resource.RLIMIT_AS)
    handlers = {number: signal.signal(number, stop) for number in (signal.SIGPROF, signal.SIGALRM)}
    resource.setrlimit(resource.RLIMIT_AS, (used + memory, old[1]))
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.setitimer(signal.ITIMER_REAL, 30 * seconds)
    try:
        yield
    except LimitExceeded:
        pytest.fail(f"took longer than {seconds} seconds")
    finally:
        for timer in (signal.ITIMER_PROF, signal.ITIMER_REAL):
            signal.setitimer(timer, 0)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        resource.setrlimit(resource.RLIMIT_AS, old)


def accepts_or_refuses(call: Callable[[], Any]) -> str | None:
    """Call a function that must return, or raise an XformerError of one line; return the message."""
    with limits():
        try:
            call()
        except XformerError as error:
            message = str(error)
            assert "\n" not in message
            assert 0 < len(message) <= MESSAGE
            return message
    return None


def byte_mutations(content: bytes) -> st.SearchStrategy[bytes]:
    """Return damaged versions of a file: bytes changed, removed, inserted and moved, and the file cut."""
    position = st.integers(0, max(len(content) - 1, 0)) | st.integers(0, min(len(content), 400))
    inserted = st.binary(max_size=12) | st.sampled_from([b"\0", b"\xff" * 8, b"\r\n", b"9" * 30, b"A" * 100_000])
    edit = st.tuples(st.sampled_from(["set", "insert", "delete", "copy", "cut"]), position, position, inserted)

    def apply(edits: list[tuple[str, int, int, bytes]]) -> bytes:
        data = bytearray(content)
        for kind, first, second, new in edits:
            start, stop = sorted((first, second))
            if kind == "set":
                data[first : first + len(new)] = new
            elif kind == "insert":
                data[first:first] = new
            elif kind == "delete":
                del data[first : first + 1 + (stop - start) % 64]
            elif kind == "copy":
                data[first:first] = data[start : start + (stop - start) % 4096]
            else:
                del data[max(first, 1) :]
        return bytes(data)

    return st.lists(edit, min_size=1, max_size=4).map(apply)


ODD_VALUES: list[Any] = [None, True, False, 0, -1, 1, 2.5, 10**15, 10**400, 1e308, float("nan"), float("inf")]
ODD_VALUES += ["", "x", "\0", "../../etc/passwd", "/etc/passwd", "a" * 5000, [], [1], ["a"], [[]], {}, {"a": 1}]


def json_mutations(value: Any) -> st.SearchStrategy[bytes]:
    """Return JSON documents in which one to three values are replaced, removed or renamed."""
    paths = list(_paths(value))
    edit = st.tuples(st.sampled_from(paths), st.sampled_from([*ODD_VALUES, "remove", "rename"]))

    def apply(edits: list[tuple[tuple[Any, ...], Any]]) -> bytes:
        changed = copy.deepcopy(value)
        for path, new in edits:
            with contextlib.suppress(KeyError, IndexError, TypeError):  # an earlier edit removed it
                parent = changed
                for key in path[:-1]:
                    parent = parent[key]
                if new == "remove":
                    del parent[path[-1]]
                elif new == "rename" and isinstance(parent, dict):
                    parent["renamed"] = parent.pop(path[-1])
                else:
                    parent[path[-1]] = copy.deepcopy(new)
        return json.dumps(changed).encode()

    return st.lists(edit, min_size=1, max_size=3).map(apply)


def _paths(value: Any, prefix: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value[:20]) if isinstance(value, list) else ()
    for key, item in items:
        yield (*prefix, key)
        yield from _paths(item, (*prefix, key))


def contents(directory: Path) -> dict[str, bytes | None]:
    """Return every file below a directory with its content, and every directory."""
    return {
        str(path.relative_to(directory)): path.read_bytes() if path.is_file() else None
        for path in sorted(directory.rglob("*"))
    }
