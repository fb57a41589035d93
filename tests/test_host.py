"""Threads, freed memory, and memory that processes share."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from xformer import host
from xformer.errors import ConfigError

ROOT = Path(__file__).parents[1]

# Allocates and frees what a step does, and prints how many page faults that costs once it has warmed up.
FAULTS = """
import resource, sys
import numpy as np
from xformer.host import keep_freed_memory

def step():
    kept = [np.ones(1_000_000, dtype="float32") for _ in range(10)]

kept = sys.argv[1] == "keep" and keep_freed_memory()
step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    step()
print(kept, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def page_faults(how):
    # Large arrays would otherwise ask for huge pages, which depends on the kernel's settings.
    environment = {**os.environ, "NUMPY_MADVISE_HUGEPAGE": "0"}
    done = subprocess.run(
        [sys.executable, "-c", FAULTS, how], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    kept, faults = done.stdout.split()
    return kept == "True", int(faults)


@pytest.mark.skipif(not host._is_glibc(), reason="the C library is not glibc")
def test_freed_memory_is_kept():
    kept, faults = page_faults("keep")
    assert kept
    assert faults < page_faults("usual")[1] / 20


def no_such_name(name):
    raise ValueError("unrecognized configuration name")


@pytest.mark.parametrize("answer", [lambda name: None, lambda name: "musl 1.2", no_such_name])
def test_other_c_libraries_are_left_alone(monkeypatch, answer):
    monkeypatch.setattr(os, "confstr", answer)
    assert host.keep_freed_memory() is False


def test_systems_without_confstr_are_left_alone(monkeypatch):
    monkeypatch.delattr(os, "confstr")
    assert host.keep_freed_memory() is False


def test_threads_come_from_the_environment(monkeypatch):
    monkeypatch.setenv("XFORMER_NUM_THREADS", "3")
    assert host.available_threads() == 3


@pytest.mark.parametrize("setting", ["", " "])
def test_threads_default_to_the_cores_of_the_process(monkeypatch, setting):
    monkeypatch.setenv("XFORMER_NUM_THREADS", setting)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 5, 7}, raising=False)
    assert host.available_threads() == 3
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    assert host.available_threads() == 6


@pytest.mark.parametrize("setting", ["0", "-2", "two", "1.5"])
def test_a_bad_number_of_threads_is_refused(monkeypatch, setting):
    monkeypatch.setenv("XFORMER_NUM_THREADS", setting)
    with pytest.raises(
        ConfigError, match=rf"^XFORMER_NUM_THREADS is '{setting}'; expected a whole number of at least 1"
    ):
        host.available_threads()


def blas_pools():
    """The threads of every linear algebra library in the process."""
    threadpoolctl = pytest.importorskip("threadpoolctl")
    return [pool["num_threads"] for pool in threadpoolctl.threadpool_info() if pool["user_api"] == "blas"]


def test_blas_threads_are_held_inside_the_block_alone():
    threadpoolctl = pytest.importorskip("threadpoolctl")
    with threadpoolctl.threadpool_limits(3, user_api="blas"):
        for count in (1, 2):
            with host.blas_threads(count) as held:
                assert held
                assert set(blas_pools()) == {count}
            assert set(blas_pools()) == {3}
        with host.one_blas_thread():
            assert set(blas_pools()) == {1}


def test_blas_threads_are_never_raised():
    with host.blas_threads(1), host.blas_threads(4) as held:
        assert held
        assert set(blas_pools()) <= {1}


def test_blas_threads_without_threadpoolctl(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with host.blas_threads(1) as held:
        assert not held


# --- side_by_side ------------------------------------------------------------------


def test_side_by_side_keeps_the_order_and_uses_threads():
    barrier = threading.Barrier(3, timeout=30)

    def work(item):
        barrier.wait()  # passes only when all three run at once
        return item * item, threading.get_ident()

    results = host.side_by_side(work, iter([1, 2, 3]))
    assert [square for square, _ in results] == [1, 4, 9]
    assert len({thread for _, thread in results}) == 3
    assert results[0][1] == threading.get_ident()
    assert host.side_by_side(work, []) == []


def test_side_by_side_within_itself_runs_in_line():
    def inner(item):
        return threading.get_ident()

    def outer(item):
        return {threading.get_ident(), *host.side_by_side(inner, [1, 2])}

    assert [len(threads) for threads in host.side_by_side(outer, [1, 2])] == [1, 1]
    assert len(set(host.side_by_side(inner, [1, 2]))) == 2  # and the mark does not stay


@pytest.mark.parametrize("bad", [0, 1])
def test_side_by_side_raises_when_all_work_has_ended(bad):
    ended = []

    def work(item):
        if item == bad:
            raise KeyError(item)
        time.sleep(0.05)
        ended.append(item)

    with pytest.raises(KeyError):
        host.side_by_side(work, [0, 1, 2])
    assert sorted(ended) == [item for item in range(3) if item != bad]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
def test_side_by_side_works_in_a_forked_process():
    program = """
import os, sys, warnings
warnings.simplefilter("ignore", DeprecationWarning)
from xformer.host import side_by_side
side_by_side(abs, [-1, -2])
child = os.fork()
if child == 0:
    os._exit(0 if side_by_side(abs, [-1, -2]) == [1, 2] else 1)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, timeout=60).returncode == 0


# --- SharedArrays ------------------------------------------------------------------


@pytest.mark.skipif(not host.can_share_memory(), reason="the system cannot share anonymous memory")
def test_shared_arrays_are_one_memory():
    specs = [((2, 3), np.dtype("float32")), ((), np.dtype("float64")), ((0, 4), np.dtype("float32")), ((5,), "int64")]
    mine = host.SharedArrays(specs)
    theirs = host.SharedArrays(specs, os.dup(mine.descriptor))
    assert [(array.shape, array.dtype) for array in mine.arrays] == specs
    assert all((array == 0).all() for array in mine.arrays)
    assert all(array.ctypes.data % 64 == 0 for array in mine.arrays if array.size)
    for number, array in enumerate(mine.arrays):
        array[...] = number + 1
    for number, array in enumerate(theirs.arrays):
        assert (array == number + 1).all()
    mine.close()
    theirs.close()
    theirs.arrays[0][0, 0] = 9.0  # the memory outlives its descriptor
    assert mine.arrays[0][0, 0] == 9.0
