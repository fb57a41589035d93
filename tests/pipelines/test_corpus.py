"""The engine of large files, with a function that costs nothing; tests/cli/test_corpus.py has the commands."""

from __future__ import annotations

import io
import os
import signal
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest

from xformer.errors import ConfigError, CorpusError, DataError
from xformer.pipelines import ChunkOutput, WorkerProcesses, process_corpus

LINES = [f"line {number}" for number in range(95)]


def number_lines(lines, first_index):
    data = "".join(f"{index} {line}\n" for index, line in enumerate(lines, start=first_index))
    return ChunkOutput(data.encode(), {"lines": len(lines)})


EXPECTED = number_lines(LINES, 0).data


@pytest.fixture
def source(tmp_path):
    (tmp_path / "source").write_text("\n".join(LINES) + "\n")
    return tmp_path / "source"


@pytest.fixture
def run(source, tmp_path):
    """Process the source in chunks of ten lines."""

    def call(function=number_lines, out="out", executor=None, **options):
        options = {"settings": {"a": 1, "b": {"c": 2}}, "chunk_lines": 10, **options}
        with executor or ThreadPoolExecutor(2) as each:
            return process_corpus(function, source, tmp_path / out, executor=each, **options)

    return call


def merged(corpus):
    corpus.merge_lines(corpus.directory / "output")
    return (corpus.directory / "output").read_bytes()


def make_array(lines, first_index):
    file = io.BytesIO()
    np.save(file, np.full((len(lines), 2), first_index))
    return ChunkOutput(file.getvalue(), {"lines": len(lines)})


class InlineExecutor(Executor):
    """Runs each task when it is submitted."""

    def submit(self, fn, /, *args, **kwargs):
        future = Future()
        future.set_result(fn(*args, **kwargs))
        return future


@pytest.mark.parametrize(
    "make",
    [
        InlineExecutor,
        lambda: WorkerProcesses(2),
        pytest.param(lambda: ProcessPoolExecutor(1, mp_context=get_context("spawn")), marks=pytest.mark.slow),
    ],
    ids=["inline", "worker processes", "standard library"],
)
def test_any_executor_gives_the_same(run, make):
    corpus = run(executor=make())
    assert merged(corpus) == EXPECTED
    assert corpus.counts == {"lines": 95}
    assert [part.name for part in corpus.parts()] == [f"part-{number:08}.txt" for number in range(10)]


@pytest.mark.parametrize("max_pending", [2, 100])
def test_a_window_of_tasks_is_pending(run, max_pending):
    pending, largest = set(), []

    class Counting(ThreadPoolExecutor):
        def submit(self, *args):
            future = super().submit(*args)
            pending.add(future)
            largest.append(sum(not each.done() for each in pending))
            return future

    run(executor=Counting(1), max_pending=max_pending)
    assert len(pending) == 11  # ten chunks and the check
    assert max(largest) <= max_pending


def test_only_missing_parts_are_computed_again(run, tmp_path):
    corpus = run()
    calls, states = [], []
    for number in (3, 9):
        (tmp_path / "out" / f"part-{number:08}.txt").unlink()

    def function(lines, first_index):
        calls.append(first_index)
        return number_lines(lines, first_index)

    corpus = run(function, on_progress=states.append)
    assert sorted(calls) == [0, 30, 90]  # the first is the check, without lines
    assert (states[0].num_resumed, states[-1].num_done) == (80, 95)
    assert merged(corpus) == EXPECTED
    assert corpus.counts == {"lines": 95}
    run(lambda lines, first_index: pytest.fail("nothing is missing"))


def test_a_truncated_part_is_computed_again(run, tmp_path):
    run()
    path = tmp_path / "out" / "part-00000003.txt"
    path.write_bytes(path.read_bytes()[:-20])
    corpus = run()
    assert merged(corpus) == EXPECTED
    path.write_bytes(b"x")
    with pytest.raises(CorpusError, match=r"part-00000003.txt has 0 lines, not the 10 that were written; run the same"):
        merged(corpus)


def test_other_settings_are_refused(run, tmp_path):
    run()
    before = sorted(path.name for path in (tmp_path / "out").iterdir())
    for change, message in (
        ({"settings": {"a": 2, "b": {"c": 2}}}, "was started with a 1, not 2"),
        ({"settings": {"a": 1, "b": {"c": 2}, "d": 3}}, "was started with d unset, not 3"),
        ({"settings": {"a": 1, "b": {}}}, "was started with b.c 2, not unset"),
        ({"chunk_lines": 20}, "was started with chunk_lines 10, not 20"),
    ):
        with pytest.raises(ConfigError, match=message):
            run(**change)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == before


def test_another_source_is_refused(run, source):
    run()
    source.write_text(source.read_text().replace("line 7", "Line 7"))
    with pytest.raises(ConfigError, match=r"was started with source.digest \w+, not \w+"):
        run()


def test_a_directory_with_other_files_is_refused(run, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("")
    with pytest.raises(ConfigError, match=r"is not empty and has no manifest\.json"):
        run()


@pytest.mark.parametrize("part", [b"\x93NUMPY\x01\x00v\x00{'descr'", np.zeros((10, 3)), np.zeros(())])
def test_merge_arrays_refuses_a_damaged_part(run, tmp_path, part):
    corpus = run(make_array, suffix=".npy")
    path = tmp_path / "out" / "part-00000003.npy"
    if isinstance(part, bytes):
        path.write_bytes(part)
    else:
        np.save(path, part)
    with pytest.raises(CorpusError, match=r"part-00000003.npy.*; remove it, and run again"):
        corpus.merge_arrays(tmp_path / "all.npy")
    assert not (tmp_path / "all.npy").exists()
    path.unlink()
    run(make_array, suffix=".npy").merge_arrays(tmp_path / "all.npy")
    assert np.load(tmp_path / "all.npy")[:, 1].tolist() == [number // 10 * 10 for number in range(len(LINES))]


def test_damaged_lines_of_the_log_are_ignored(run, tmp_path):
    run()
    log = tmp_path / "out" / "log.jsonl"
    log.write_bytes(b"\n".join([b"\xff", b"[]", b'{"chunk": 0, "cou', log.read_bytes()]))
    assert run().counts["lines"] == len(LINES)


def test_a_function_that_fails_without_lines_stops_before_any_chunk(run, tmp_path):
    def function(lines, first_index):
        raise ConfigError("num_beams is 0")

    with pytest.raises(CorpusError, match="num_beams is 0"):
        run(function)
    assert not [*(tmp_path / "out").glob("part-*")]


# --- Failures ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [DataError("line 44 is bad"), ValueError("bad")], ids=["ours", "other"])
def test_a_chunk_that_fails_three_times_is_recorded_and_skipped(run, tmp_path, error):
    calls, is_fixed = [], []

    def function(lines, first_index):
        calls.append(first_index)
        if first_index == 40 and not is_fixed:
            raise error
        return number_lines(lines, first_index)

    corpus = run(function)
    path = tmp_path / "out" / "part-00000004.error"
    assert calls.count(40) == 3
    assert [*corpus.failures] == [path]
    assert path.read_text().startswith("line 44 is bad\n" if isinstance(error, DataError) else "ValueError: bad\nTrace")
    assert sum(part.exists() for part in corpus.parts()) == 9
    is_fixed.append(True)
    corpus = run(function)
    assert (corpus.failures, merged(corpus), path.exists()) == ({}, EXPECTED, False)


def test_a_chunk_that_fails_once_is_tried_again(run):
    failed = []

    def function(lines, first_index):
        if lines and first_index not in failed:
            failed.append(first_index)
            raise RuntimeError("once")
        return number_lines(lines, first_index)

    corpus = run(function)
    assert (len(failed), corpus.failures, merged(corpus)) == (10, {}, EXPECTED)


def test_ten_failures_in_a_row_stop_the_run_but_not_the_next_one(run):
    bad = set(range(12))

    def function(lines, first_index):
        if lines and first_index in bad:
            raise DataError(f"bad {first_index}")
        return number_lines(lines, first_index)

    with pytest.raises(CorpusError, match="10 chunks in a row failed, the last with: bad"):
        run(function, chunk_lines=1, executor=ThreadPoolExecutor(1), max_pending=1)
    bad -= {0}
    corpus = run(function, chunk_lines=1, executor=ThreadPoolExecutor(1), max_pending=1)
    assert len(corpus.failures) == 11  # two, the lines without errors, and those that had failed before
    bad.clear()
    assert run(function, chunk_lines=1).failures == {}


def kill_worker(lines, first_index):
    marker = Path(os.environ["XFORMER_TEST_MARKER"])
    if first_index == 20 and len(marker.read_bytes()) < int(os.environ["XFORMER_TEST_KILLS"]):
        with marker.open("ab") as file:
            file.write(b"x")
        os.kill(os.getpid(), signal.SIGKILL)
    return number_lines(lines, first_index)


@pytest.mark.slow
@pytest.mark.parametrize("num_kills", [2, 9])
def test_a_killed_worker_fails_its_own_chunk_only(run, tmp_path, monkeypatch, num_kills):
    monkeypatch.setenv("XFORMER_TEST_MARKER", str(tmp_path / "marker"))
    monkeypatch.setenv("XFORMER_TEST_KILLS", str(num_kills))
    (tmp_path / "marker").touch()
    corpus = run(kill_worker, executor=WorkerProcesses(2))
    if num_kills < 3:
        assert merged(corpus) == EXPECTED
    else:
        ((path, error),) = corpus.failures.items()
        assert path.name == "part-00000002.error"
        assert "worker process was killed by signal 9" in error
