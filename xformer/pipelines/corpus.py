"""Processing of large files: chunks of lines that any executor computes, kept on disk until all are complete.

A chunk is complete if its part has the size that log.jsonl states. A part appears by renaming and depends on nothing
but the chunk, so a task that runs twice, or in a process that should have ended, does no harm.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, CancelledError, Executor, Future, wait
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from xformer.config import check_count, dotted
from xformer.errors import ConfigError, CorpusError, XformerError, is_out_of_memory
from xformer.io import StrPath, atomic_write, file_errors, lock_directory, read_json, read_log, write_bytes, write_json
from xformer.text.corpus import LineChunk, digest_of, line_chunks

_FORMAT = 1  # of manifest.json
_MANIFEST, _LOG = "manifest.json", "log.jsonl"
_NUM_TRIES = 3  # of a chunk
_MAX_FAILURES = 10  # chunks in a row
_NO_COUNTS: Mapping[str, int] = MappingProxyType({})


class ChunkOutput(NamedTuple):
    """The output for a chunk.

    Attributes:
        data: Content of the part.
        counts: Numbers to add up over all chunks, by name, e.g. of lines that were cut.
    """

    data: bytes
    counts: Mapping[str, int] = _NO_COUNTS


ChunkFunction = Callable[[list[str], int], ChunkOutput]
"""Function of the lines of a chunk and the index of the first; must be picklable and accept an empty list."""


class CorpusProgress(NamedTuple):
    """State of a run.

    Attributes:
        num_lines: Lines of the source.
        num_done: Lines whose outputs are on disk.
        num_resumed: Those whose outputs were on disk when the run started.
        num_failed: Chunks that failed.
    """

    num_lines: int
    num_done: int
    num_resumed: int
    num_failed: int = 0


@dataclass(frozen=True)
class Corpus:
    """The parts in a directory after a run.

    Attributes:
        directory: The directory.
        suffix: Suffix of the parts.
        num_chunks: Number of chunks.
        failures: Error of each chunk that failed, by the path of its .error file.
        counts: Sums of `ChunkOutput.counts` over all runs.
        part_lines: Number of lines of each part.
    """

    directory: Path
    suffix: str
    num_chunks: int
    failures: dict[Path, str]
    counts: dict[str, int]
    part_lines: dict[int, int]

    def parts(self) -> Iterator[Path]:
        """Yield the paths of the parts in the order of the source."""
        return (_part(self.directory, number, self.suffix) for number in range(self.num_chunks))

    def merge_lines(self, output: StrPath) -> None:
        """Write the parts one after another to a file, which appears when it is complete.

        Raises:
            ConfigError: If the file is one that the run keeps.
            CheckpointError: If the file cannot be written.
            CorpusError: If a part has another number of lines than when it was written.
        """
        check_not_ledger(output, self.directory)
        with atomic_write(output) as file:
            for number, part in enumerate(self.parts()):
                data = part.read_bytes()
                if (num_lines := data.count(b"\n")) != self.part_lines[number]:
                    received = f"{part} has {num_lines} lines, not the {self.part_lines[number]} that were written"
                    raise CorpusError(f"{received}; run the same command again")
                file.write(data)

    def merge_arrays(self, output: StrPath) -> None:
        """Write the rows of the parts, which are .npy files, as one array to a .npy file.

        Raises:
            ConfigError: If the file is one that the run keeps.
            CheckpointError: If the file cannot be written.
            CorpusError: If a part is damaged.
        """
        check_not_ledger(output, self.directory)
        first = _read_array(next(self.parts()))
        num_rows = 0
        for part in self.parts():
            array = _read_array(part)
            if array.dtype != first.dtype or array.ndim == 0 or array.shape[1:] != first.shape[1:]:
                received = f"{part} has shape {array.shape} and dtype {array.dtype}, the first part {first.shape} and"
                raise CorpusError(f"{received} {first.dtype}; remove it, and run again")
            num_rows += array.shape[0]
        header = np.lib.format.header_data_from_array_1_0(first) | {"shape": (num_rows, *first.shape[1:])}
        with atomic_write(output) as file:
            np.lib.format.write_array_header_1_0(file, header)
            for part in self.parts():
                file.write(_read_array(part).tobytes())


def process_corpus(
    function: ChunkFunction,
    source: StrPath,
    directory: StrPath,
    *,
    executor: Executor,
    settings: Mapping[str, Any],
    chunk_lines: int = 10_000,
    suffix: str = ".txt",
    max_pending: int = 1000,
    on_progress: Callable[[CorpusProgress], object] = lambda progress: None,
) -> Corpus:
    """Compute the outputs for all lines of a file, chunk by chunk; the same call resumes an interrupted run.

    The parts are the same for any executor and any number of workers, and memory does not grow with the file. A chunk
    that fails three times is recorded in part-N.error, and the others continue; the next run tries it again.

    Args:
        function: Computes the outputs for a chunk; called in each run without lines first, to check its settings.
        source: File of UTF-8 text, which all workers read.
        directory: Directory for the parts, new or of an earlier run, to which all workers write.
        executor: Runs the tasks, e.g. `WorkerProcesses(4)`, or `Client(address).get_executor(pure=False)` of Dask.
        settings: All that determines the outputs besides the source, JSON-serializable. A run with other settings in
            the same directory is refused.
        chunk_lines: Lines of a chunk.
        suffix: Suffix of the parts.
        max_pending: Maximum number of tasks submitted at a time.
        on_progress: Called at the start, and after each chunk.

    Raises:
        DataError: If the source is empty or not valid UTF-8.
        ConfigError: If the directory has a run with other settings, or other files.
        CheckpointError: If the directory is in use or cannot be written.
        CorpusError: If the function fails without lines, a worker cannot read or write its files, or ten chunks in a
            row fail.
    """
    check_count("chunk_lines", chunk_lines)
    check_count("max_pending", max_pending)
    directory = Path(directory)
    chunks = line_chunks(source, chunk_lines)
    num_lines = sum(chunk.num_lines for chunk in chunks)
    with file_errors(f"cannot create {directory}"):
        directory.mkdir(parents=True, exist_ok=True)
    failures: dict[Path, str] = {}
    with lock_directory(directory, "processing a corpus"):
        _check_manifest(
            directory,
            {
                "format": _FORMAT,
                "settings": json.loads(json.dumps(settings)),
                "chunk_lines": chunk_lines,
                "source": {"bytes": chunks[-1].stop, "lines": num_lines, "digest": digest_of(chunks)},
            },
        )
        events = _read_events(directory)

        def is_missing(number: int) -> bool:
            part = _part(directory, number, suffix)
            return number not in events or not part.exists() or part.stat().st_size != events[number]["bytes"]

        missing = [number for number in range(len(chunks)) if is_missing(number)]
        # Those that failed before come last, so that they do not stop the run again.
        missing.sort(key=lambda number: _part(directory, number, ".error").exists())
        num_resumed = num_lines - sum(chunks[number].num_lines for number in missing)
        progress = CorpusProgress(num_lines, num_resumed, num_resumed)
        on_progress(progress)

        def submit(number: int | None = None) -> Future[_Outcome]:
            task = () if number is None else (chunks[number], _part(directory.absolute(), number, suffix))
            try:
                return executor.submit(_run, function, *task)
            except Exception as error:
                message = f"{type(error).__name__}: {_first_line(str(error))}"
                raise CorpusError(f"the executor accepts no task ({message}); restart it, and run again") from error

        if missing and (message := _outcome_of(submit()).error):
            raise CorpusError(_first_line(message))
        for number, outcome in _run_all(submit, missing, max_pending):
            error_path = _part(directory, number, ".error")
            with file_errors(f"cannot write to {directory}"):
                if outcome.error:
                    failures[error_path] = outcome.error
                    write_bytes(error_path, f"{outcome.error}\n".encode())
                else:
                    error_path.unlink(missing_ok=True)
                    with (directory / _LOG).open("a", encoding="utf-8") as lines:
                        lines.write(json.dumps({"chunk": number, **(outcome.event or {})}) + "\n")
            num_done = progress.num_done + (0 if outcome.error else chunks[number].num_lines)
            progress = progress._replace(num_done=num_done, num_failed=len(failures))
            on_progress(progress)
        for temporary in directory.glob(".part-*"):  # of processes that were killed
            with contextlib.suppress(OSError):
                temporary.unlink()
        events, counts = _read_events(directory), Counter[str]()
        for event in events.values():
            counts.update(event["counts"])
        part_lines = {number: event["lines"] for number, event in events.items()}
        return Corpus(directory, suffix, len(chunks), failures, dict(counts), part_lines)


def check_not_ledger(output: StrPath, directory: StrPath) -> None:
    """Raise ConfigError if an output would replace a file of a run, or its directory, now or when the run makes it."""
    path, folder = Path(os.path.realpath(output)), Path(os.path.realpath(directory))
    name = path.name.casefold()  # some file systems ignore case
    if path == folder or (path.parent == folder and (name in (_MANIFEST, _LOG) or name.startswith((".", "part-")))):
        raise ConfigError(f"the output {output} belongs to the run in {directory}; choose another name, or none")


class _Outcome(NamedTuple):
    error: str = ""
    event: Mapping[str, Any] | None = None  # for the log
    is_fatal: bool = False


def _run_all(
    submit: Callable[[int], Future[_Outcome]], numbers: list[int], max_pending: int
) -> Iterator[tuple[int, _Outcome]]:
    """Yield the number and the outcome of each chunk when it is complete, or has failed three times."""
    remaining, num_tries = deque(numbers), Counter[int]()
    pending: dict[Future[_Outcome], int] = {}
    num_failed = 0  # in a row
    try:
        while remaining or pending:
            while remaining and len(pending) < max_pending:
                number = remaining.popleft()
                pending[submit(number)] = number
            future = next(iter(wait(pending, return_when=FIRST_COMPLETED).done))
            number, outcome = pending.pop(future), _outcome_of(future)
            num_tries[number] += 1
            if outcome.error and num_tries[number] < _NUM_TRIES:
                remaining.appendleft(number)
                continue
            if outcome.is_fatal:
                raise CorpusError(_first_line(outcome.error))
            num_failed = num_failed + 1 if outcome.error else 0
            yield number, outcome
            if num_failed == _MAX_FAILURES:
                raise CorpusError(f"{num_failed} chunks in a row failed, the last with: {_first_line(outcome.error)}")
    finally:
        for future in pending:
            future.cancel()


def _run(function: ChunkFunction, chunk: LineChunk | None = None, part: Path | None = None) -> _Outcome:
    """Write the part of a chunk, or only call the function without lines. This is what workers run."""
    start = time.perf_counter()
    try:
        if chunk is None or part is None:
            output = function([], 0)
        else:
            output = function(chunk.read(), chunk.first_index)
            write_bytes(part, output.data)
    except Exception as error:  # noqa: BLE001 - functions of users raise anything; any executor can return a text
        is_known = isinstance(error, XformerError)
        message = str(error) if is_known else f"{type(error).__name__}: {error}\n{traceback.format_exc()}"
        # A file that cannot be read or written concerns all chunks.
        return _Outcome(message, is_fatal=isinstance(error, OSError) and not is_out_of_memory(error))
    sizes = {"bytes": len(output.data), "lines": output.data.count(b"\n")}
    seconds = round(time.perf_counter() - start, 4)
    return _Outcome(event={"seconds": seconds, **sizes, "counts": dict(output.counts)})


def _outcome_of(future: Future[_Outcome]) -> _Outcome:
    """Return the outcome of a task, which may have been lost with its worker."""
    try:
        return future.result()
    except CancelledError:
        return _Outcome("the executor canceled a task; its scheduler may have ended", is_fatal=True)
    except Exception as error:  # noqa: BLE001 - each executor has its own
        return _Outcome(f"{type(error).__name__}: {error}")


def _first_line(error: str) -> str:
    return error.partition("\n")[0]


def _part(directory: Path, number: int, suffix: str) -> Path:
    return directory / f"part-{number:08}{suffix}"


def _read_array(part: Path) -> np.ndarray:
    """Map a part into memory; raise CorpusError if it is damaged."""
    try:
        return np.lib.format.open_memmap(part, mode="r")
    except Exception as error:  # damaged headers raise many types
        message = f"cannot read {part} as an array ({_first_line(str(error))}); remove it, and run again"
        raise CorpusError(message) from error


def _read_events(directory: Path) -> dict[int, dict[str, Any]]:
    """Return the last event of each chunk."""
    return {event["chunk"]: event for event in read_log(directory / _LOG)}


def _check_manifest(directory: Path, manifest: dict[str, Any]) -> None:
    """Write the manifest of a new run, or check that the run in the directory is the same."""
    path = directory / _MANIFEST
    if not path.exists():
        if any(not path.name.startswith(".") for path in directory.iterdir()):
            raise ConfigError(f"{directory} is not empty and has no manifest.json; choose a new directory")
        write_json(path, manifest)
        return
    old, new = dotted(read_json(path, "manifest")), dotted(manifest)
    for name in {**new, **old}:
        if old.get(name) != new.get(name):
            before, now = ("unset" if values.get(name) is None else values[name] for values in (old, new))
            received = f"{directory} was started with {name.removeprefix('settings.')} {before}, not {now}"
            raise ConfigError(f"{received}; repeat the first command, or choose a new directory")
