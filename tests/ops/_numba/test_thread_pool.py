"""The thread pool of compiled kernels: every part of a job runs once, on several threads, and nothing hangs."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import numpy as np
import pytest

pytest.importorskip("numba")

from numba.types import Array, int64

from xformer.ops._numba import thread_pool as kernels
from xformer.ops._numba import thread_pool as pool
from xformer.ops._numba.compile import parallel_body

COUNTS = Array(int64, 1, "C")
call, _load_args = kernels.parallel_kernel(COUNTS)
MAX_POLLS = 1 << 33  # some seconds


@parallel_body
def count(job):
    """Count each part."""
    state = kernels.job_state(job)
    (counts,) = _load_args(state)
    part = kernels.next_part(state)
    while part >= 0:
        counts[part] += 1
        part = kernels.next_part(state)


@parallel_body
def meet(job):
    """In each part, wait until as many parts have started as there are counts."""
    state = kernels.job_state(job)
    (counts,) = _load_args(state)
    part = kernels.next_part(state)
    while part >= 0:
        kernels.atomic_add(counts, 0, 1)
        polls = 0
        while kernels.atomic_load(counts, 0) < counts.size and polls < MAX_POLLS:
            polls += 1
        counts[part] += polls
        part = kernels.next_part(state)


@parallel_body
def enter(job):
    """Count the threads that enter; the first part takes long."""
    state = kernels.job_state(job)
    (counts,) = _load_args(state)
    kernels.atomic_add(counts, 0, 1)
    part = kernels.next_part(state)
    while part >= 0:
        for _ in range(200_000 if part == 0 else 0):
            kernels.atomic_load(counts, 0)
        part = kernels.next_part(state)


@parallel_body
def out_of_memory(job):
    """Return before the first part, as after a failed allocation."""


@pytest.fixture(autouse=True)
def three_threads(monkeypatch):
    monkeypatch.setenv("XFORMER_NUM_THREADS", "3")


def awake(helpers):
    """Wake helpers, and wait until they poll for a job."""
    deadline = time.monotonic() + 60.0
    while pool._pool().state[kernels.AWAKE] < helpers:
        assert time.monotonic() < deadline, "the helpers did not wake up"
        pool._pool().wake(helpers)
        time.sleep(0.0001)


def helped():
    """Return whether the last shared job had a helper: each thread asks for one part more than there are."""
    state = pool._pool().state
    return state[kernels.NEXT_PART] > state[kernels._NUM_PARTS] + 1


@pytest.mark.parametrize("parts", [0, 1, 2, 3, 1000])
def test_every_part_runs_once(parts):
    for _ in range(50):
        counts = np.zeros(parts, np.int64)
        pool.run_parallel(call, count, parts, 3, counts)
        np.testing.assert_array_equal(counts, np.ones(parts))


@pytest.mark.parametrize("threads", [2, 3])
def test_threads_run_at_the_same_time(threads):
    warm = np.zeros(1, np.int64)
    pool.run_parallel(call, meet, 1, 3, warm)  # compiles it
    counts = np.zeros(threads, np.int64)
    awake(2)
    pool.run_parallel(call, meet, threads, 3, counts)
    assert counts[0] >= threads  # all have started
    assert (counts[1:] < MAX_POLLS).all()  # and none has stopped waiting


def test_helpers_enter_a_job_once():
    for _ in range(50):
        entries = np.zeros(1, np.int64)
        awake(2)
        pool.run_parallel(call, enter, 3, 3, entries)
        assert 1 <= entries[0] <= 3


def test_threads_that_cannot_start_are_not_needed(monkeypatch):
    def refuse_to_start(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(pool, "_pools", [])
    monkeypatch.setattr(threading.Thread, "start", refuse_to_start)
    counts = np.zeros(5, np.int64)
    pool.run_parallel(call, count, 5, 3, counts)
    np.testing.assert_array_equal(counts, np.ones(5))
    pool._pool().stop()


def test_an_error_is_raised_if_no_thread_took_a_part():
    counts = np.zeros(2, np.int64)
    with pytest.raises(MemoryError, match="not enough memory for the buffers of a compiled kernel"):
        pool.run_parallel(call, out_of_memory, 2, 3, counts)
    pool.run_parallel(call, count, 2, 3, counts)  # the pool is free again
    np.testing.assert_array_equal(counts, np.ones(2))


def test_the_number_of_threads_grows_with_the_work():
    assert pool.threads_for(1) == 1
    assert pool.threads_for(2 * pool._MIN_MULTIPLICATIONS) == 2
    assert pool.threads_for(1 << 40) == 3


def test_concurrent_callers_do_not_mix_their_jobs():
    results = [np.zeros(300, np.int64) for _ in range(4)]

    def work(counts):
        for _ in range(200):
            pool.run_parallel(call, count, 300, 3, counts)

    threads = [threading.Thread(target=work, args=(counts,)) for counts in results]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    np.testing.assert_array_equal(results, np.full((4, 300), 200))


def test_helpers_sleep_and_wake_up_again():
    awake(2)
    for _ in range(500):
        if pool._pool().state[kernels.AWAKE] == 0:
            break
        time.sleep(0.01)
    assert pool._pool().state[kernels.AWAKE] == 0
    awake(2)


def test_a_process_can_exit_while_helpers_are_awake():
    program = (
        "import numpy as np; from xformer.ops.linear.numba import _affine;"
        "a = np.ones((400, 400), 'f'); [_affine(a, a, None) for _ in range(20)]; print('done')"
    )
    for _ in range(3):
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
        assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")
