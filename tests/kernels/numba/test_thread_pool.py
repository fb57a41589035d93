"""Threads that share a job: all parts are done once, by several, whoever is awake, and nothing of it hangs."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import numpy as np
import pytest

pytest.importorskip("numba")

from numba.types import Array, int64

from xformer.kernels.numba import thread_pool as pool
from xformer.kernels.numba import thread_pool_loops as loops
from xformer.kernels.numba.loops import loop, worker

COUNTS = Array(int64, 1, "C")
_counts = loops.arguments(COUNTS)
TRIES = 1 << 33  # some seconds


@worker
def count(job):
    """Count each part where it belongs."""
    words = loops.words_of(job)
    (counts,) = _counts(words)
    part = loops.next_part(words)
    while part >= 0:
        counts[part] += 1
        part = loops.next_part(words)


@worker
def meet(job):
    """In each part, wait until so many are under way: one thread alone would do so in vain."""
    words = loops.words_of(job)
    (counts,) = _counts(words)
    part = loops.next_part(words)
    while part >= 0:
        loops.add(counts, 0, 1)
        tries = 0
        while loops.look(counts, 0) < counts.size and tries < TRIES:
            tries += 1
        counts[part] += tries
        part = loops.next_part(words)


@worker
def enter(job):
    """Count who comes in; the first part takes long."""
    words = loops.words_of(job)
    (counts,) = _counts(words)
    loops.add(counts, 0, 1)
    part = loops.next_part(words)
    while part >= 0:
        for _ in range(200_000 if part == 0 else 0):
            loops.look(counts, 0)
        part = loops.next_part(words)


@worker
def refuse(job):
    """Take no part, as where there is no memory."""


@loop(*loops.SHARED, COUNTS)
def call(pool, helpers, parts, worker, counts):
    """Share."""
    loops.share(pool, helpers, parts, worker, (counts,))


@pytest.fixture(autouse=True)
def three_threads(monkeypatch):
    monkeypatch.setenv("XFORMER_NUM_THREADS", "3")


def awake(helpers):
    """Have so many helpers look for work."""
    for _ in range(500):
        pool._pool().wake(helpers)
        if pool._pool().words[loops.AWAKE] >= helpers:
            return
        time.sleep(0.0001)
    pytest.fail("the helpers did not wake up")


def helped():
    """Whether the last job that was shared had a helper: each who comes asks once more than there are parts."""
    words = pool._pool().words
    return words[loops.NEXT] > words[loops._PARTS] + 1


@pytest.mark.parametrize("parts", [0, 1, 2, 3, 1000])
def test_every_part_is_done_once(parts):
    for _ in range(50):
        counts = np.zeros(parts, np.int64)
        pool.share(call, count, parts, 3, counts)
        np.testing.assert_array_equal(counts, np.ones(parts))


@pytest.mark.parametrize("threads", [2, 3])
def test_so_many_threads_work_at_the_same_time(threads):
    warm = np.zeros(1, np.int64)
    pool.share(call, meet, 1, 3, warm)  # compiled by now
    counts = np.zeros(threads, np.int64)
    awake(2)
    pool.share(call, meet, threads, 3, counts)
    assert counts[0] >= threads  # all have come
    assert (counts[1:] < TRIES).all()  # and nobody has waited in vain


def test_helpers_enter_a_job_once():
    for _ in range(50):
        entries = np.zeros(1, np.int64)
        awake(2)
        pool.share(call, enter, 3, 3, entries)
        assert 1 <= entries[0] <= 3


def test_threads_that_cannot_start_are_done_without(monkeypatch):
    def refuse_to_start(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(pool, "_pools", [])
    monkeypatch.setattr(threading.Thread, "start", refuse_to_start)
    counts = np.zeros(5, np.int64)
    pool.share(call, count, 5, 3, counts)
    np.testing.assert_array_equal(counts, np.ones(5))
    pool._pool().stop()


def test_parts_that_nobody_took_are_missed():
    counts = np.zeros(2, np.int64)
    with pytest.raises(MemoryError, match="not enough memory for a compiled loop"):
        pool.share(call, refuse, 2, 3, counts)
    pool.share(call, count, 2, 3, counts)  # the pool is free again
    np.testing.assert_array_equal(counts, np.ones(2))


def test_small_work_stays_on_one_thread():
    assert pool.threads_for(1) == 1
    assert pool.threads_for(2 * pool._PART) == 2
    assert pool.threads_for(1 << 40) == 3


def test_callers_at_the_same_time_do_not_mix_their_jobs():
    results = [np.zeros(300, np.int64) for _ in range(4)]

    def work(counts):
        for _ in range(200):
            pool.share(call, count, 300, 3, counts)

    threads = [threading.Thread(target=work, args=(counts,)) for counts in results]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    np.testing.assert_array_equal(results, np.full((4, 300), 200))


def test_helpers_go_to_sleep_and_come_back():
    awake(2)
    for _ in range(500):
        if pool._pool().words[loops.AWAKE] == 0:
            break
        time.sleep(0.01)
    assert pool._pool().words[loops.AWAKE] == 0
    awake(2)


def test_a_process_ends_while_helpers_are_awake():
    program = (
        "import numpy as np; from xformer.kernels.numba.matmul import _affine;"
        "a = np.ones((400, 400), 'f'); [_affine(a, a, None) for _ in range(20)]; print('done')"
    )
    for _ in range(5):
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
        assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")
