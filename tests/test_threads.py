"""Thread counts, limits of linear algebra libraries, parallel loops and malloc settings."""

from __future__ import annotations

import importlib.util
import json
import os
import queue
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import xformer
from tests.reference import for_each
from xformer import environment, native, threads
from xformer.errors import ConfigError

ROOT = Path(__file__).parents[1]

# Allocates and frees what a step does, and prints how many page faults that costs once it has warmed up.
FAULTS = """
import resource, sys
import numpy as np
from xformer.threads import disable_malloc_trim

def step():
    kept = [np.ones(1_000_000, dtype="float32") for _ in range(10)]

kept = sys.argv[1] == "keep" and disable_malloc_trim()
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
    retained, faults = done.stdout.split()
    return retained == "True", int(faults)


@pytest.mark.skipif(not threads._is_glibc(), reason="the C library is not glibc")
def test_freed_memory_is_kept():
    retained, faults = page_faults("keep")
    assert retained
    assert faults < page_faults("usual")[1] / 20


@pytest.mark.parametrize(("setting", "default", "value"), [("1", False, True), ("0", True, False), ("", True, True)])
def test_env_flag(monkeypatch, setting, default, value):
    monkeypatch.setenv("XFORMER_SOME", setting)
    environment.clear_cache()
    assert environment.env_flag("XFORMER_SOME", default) is value


def test_an_env_flag_is_one_or_zero(monkeypatch):
    monkeypatch.setenv("XFORMER_SOME", "yes")
    environment.clear_cache()
    with pytest.raises(ConfigError, match=r"^XFORMER_SOME is 'yes'; expected 0 or 1$"):
        environment.env_flag("XFORMER_SOME")
    monkeypatch.setenv("XFORMER_SOME", "1")
    assert environment.env_flag("XFORMER_SOME")


def test_threads_come_from_the_environment(monkeypatch):
    monkeypatch.setenv("XFORMER_NUM_THREADS", "3")
    assert threads.num_threads() == 3


@pytest.mark.parametrize("setting", ["", " "])
def test_threads_default_to_the_cores_of_the_process(monkeypatch, setting):
    monkeypatch.setenv("XFORMER_NUM_THREADS", setting)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 5, 7}, raising=False)
    assert threads.num_threads() == 3
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    environment.clear_cache()
    assert threads.num_threads() == 6


@pytest.mark.parametrize("setting", ["0", "-2", "two", "1.5", "99999999999"])
def test_a_bad_number_of_threads_is_refused(monkeypatch, setting):
    monkeypatch.setenv("XFORMER_NUM_THREADS", setting)
    with pytest.raises(ConfigError, match=rf"^XFORMER_NUM_THREADS is '{setting}'; expected an integer from 1 to 4096"):
        threads.num_threads()


def blas_pools():
    """Return the number of threads of every linear algebra library in the process."""
    threadpoolctl = pytest.importorskip("threadpoolctl")
    return [pool["num_threads"] for pool in threadpoolctl.threadpool_info() if pool["user_api"] == "blas"]


@pytest.fixture
def three_blas_threads():
    """Every linear algebra library on three threads, which no thread of the process lays claim to."""
    threadpoolctl = pytest.importorskip("threadpoolctl")
    libraries = threadpoolctl.ThreadpoolController().select(user_api="blas").lib_controllers
    before = [library.num_threads for library in libraries]
    for library in libraries:
        library.set_num_threads(3)
        getattr(library, "clear_controlling_thread", lambda: None)()
    yield
    for library, count in zip(libraries, before, strict=True):
        library.set_num_threads(count)
        getattr(library, "clear_controlling_thread", lambda: None)()


def test_blas_threads_are_held_inside_the_block_alone(three_blas_threads):
    threadpoolctl = pytest.importorskip("threadpoolctl")
    for count in (1, 2):
        with threads.blas_threads(count):
            assert set(blas_pools()) == {count}
        assert set(blas_pools()) == {3}
    with threadpoolctl.threadpool_limits(2, user_api="blas"), threads.blas_threads(1):
        assert set(blas_pools()) == {1}
    assert set(blas_pools()) == {3}


def test_blas_threads_are_never_raised(three_blas_threads):
    with threads.blas_threads(1), threads.blas_threads(4):
        assert set(blas_pools()) == {1}
    with threads.blas_threads(4):
        assert set(blas_pools()) == {3}


def test_a_limit_ends_with_an_error(three_blas_threads):
    with pytest.raises(KeyError), threads.blas_threads(1):
        raise KeyError
    assert set(blas_pools()) == {3}


@pytest.fixture
def no_threadpoolctl(monkeypatch):
    """Look for threadpoolctl in vain."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    threads._blas_libraries.cache_clear()
    yield
    threads._blas_libraries.cache_clear()


class EachThread:
    """A library that keeps a number for each thread, as MKL does."""

    filepath, internal_api = "libmkl_rt.so", "mkl"

    def __init__(self):
        self.counts = {}

    @property
    def num_threads(self):
        return self.counts.get(threading.get_ident(), 4)

    def set_num_threads(self, count):
        self.counts[threading.get_ident()] = count


def test_libraries_that_keep_a_number_for_each_thread(monkeypatch):
    library = EachThread()
    monkeypatch.setattr(threads, "_blas_libraries", lambda modules: [library])
    monkeypatch.setattr(threads, "_requested", 3)
    barrier = threading.Barrier(3, timeout=30)

    def work(item):
        barrier.wait()
        return library.num_threads

    def elsewhere(item):
        with threads.blas_threads(1):
            return library.num_threads

    with threads.blas_threads(3), threads.blas_threads(2):
        with threads.blas_threads(1):
            assert threads.parallel_map(work, range(3)) == [1, 1, 1]
        assert library.num_threads == 2
        assert threads.parallel_map(work, range(3)) == [2, 2, 2]
        assert threads.parallel_map(elsewhere, range(3)) == [1, 1, 1]
        assert library.num_threads == 2
    assert set(library.counts.values()) == {4}


def enter_and_leave(plan):
    """Let threads enter and leave `blas_threads` one after the other; what the libraries had after each step.

    plan: (name of the thread, how many threads it holds the libraries to, or None where it leaves).
    """
    turns = {name: queue.SimpleQueue() for name, _ in plan}
    done = queue.SimpleQueue()

    def live(name):
        while (count := turns[name].get(timeout=30)) is not None:
            with threads.blas_threads(count):
                done.put(None)
                turns[name].get(timeout=30)
            done.put(None)

    started = [threading.Thread(target=live, args=[name]) for name in turns]
    for thread in started:
        thread.start()
    result = []
    for name, count in plan:
        turns[name].put(count)
        done.get(timeout=30)
        result += [set(blas_pools())]
    for name, thread in zip(turns, started, strict=True):
        turns[name].put(None)
        thread.join(timeout=30)
    return result


@for_each(
    "plan, expected",
    [
        ([("a", 1), ("b", 1), ("a", None), ("b", None)], [1, 1, 1, 3]),
        ([("a", 1), ("b", 1), ("b", None), ("a", None)], [1, 1, 1, 3]),
        ([("a", 2), ("b", 1), ("a", None), ("b", None)], [2, 1, 1, 3]),
        ([("a", 1), ("b", 2), ("a", None), ("c", 5), ("b", None), ("c", None)], [1, 1, 2, 2, 3, 3]),
    ],
)
def test_the_lowest_limit_of_all_threads_holds_and_the_last_to_leave_restores(three_blas_threads, plan, expected):
    assert enter_and_leave(plan) == [{count} for count in expected]


def run_program(program, *arguments, env=None):
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], cwd=ROOT, env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


# --- parallel_map ------------------------------------------------------------------


def test_parallel_map_keeps_the_order_and_uses_threads(monkeypatch):
    monkeypatch.setattr(threads, "_requested", 3)
    barrier = threading.Barrier(3, timeout=30)

    def work(item):
        barrier.wait()  # passes only when all three run at once
        return item * item, threading.get_ident()

    results = threads.parallel_map(work, iter([1, 2, 3]))
    assert [square for square, _ in results] == [1, 4, 9]
    assert len({thread for _, thread in results}) == 3
    assert results[0][1] == threading.get_ident()
    assert threads.parallel_map(work, []) == []


@pytest.mark.parametrize(("count", "items"), [(1, 3), (2, 5), (2, 2), (5, 3)])
def test_parallel_map_uses_at_most_num_threads(monkeypatch, count, items):
    monkeypatch.setattr(threads, "_requested", count)
    lock, busy, most = threading.Lock(), [], []

    def work(item):
        with lock:
            busy.append(item)
            most.append(len(busy))
        time.sleep(0.02)
        with lock:
            busy.remove(item)
        return -item

    assert threads.parallel_map(work, range(items)) == [-item for item in range(items)]
    assert max(most) <= count


def test_nested_parallel_map_runs_serially(monkeypatch):
    monkeypatch.setattr(threads, "_requested", 2)

    def inner(item):
        return threading.get_ident()

    def outer(item):
        return {threading.get_ident(), *threads.parallel_map(inner, [1, 2])}

    assert [len(idents) for idents in threads.parallel_map(outer, [1, 2])] == [1, 1]
    assert len(set(threads.parallel_map(inner, [1, 2]))) == 2  # and the mark does not stay


@pytest.mark.parametrize("bad", [0, 1])
def test_parallel_map_raises_after_all_threads_have_ended(monkeypatch, bad):
    monkeypatch.setattr(threads, "_requested", 3)
    ended = []

    def work(item):
        if item == bad:
            raise KeyError(item)
        time.sleep(0.05)
        ended.append(item)

    with pytest.raises(KeyError):
        threads.parallel_map(work, [0, 1, 2])
    assert sorted(ended) == [item for item in range(3) if item != bad]


@pytest.mark.parametrize("count", [1, 2, 3, 7])
@pytest.mark.parametrize("bad", [{0}, {3, 4, 6}, {1, 2}, {5, 2, 4}])
def test_parallel_map_raises_the_error_of_the_first_item_for_any_number_of_threads(monkeypatch, count, bad):
    monkeypatch.setattr(threads, "_requested", count)

    def work(item):
        time.sleep(0.01 * (item == min(bad)))  # later items fail before it
        if item in bad:
            raise KeyError(item)

    with pytest.raises(KeyError, match=f"^{min(bad)}$"):
        threads.parallel_map(work, range(7))


# In a process of its own, since one whose pool is stuck does not end.
CALLERS = """
import os, threading
from xformer import threads
threads._MAX_WORKERS = 2
threads.set_num_threads(3)
start, found = threading.Barrier(8), {}
def work(item):
    return sum(threads.parallel_map(abs, [-item, -1, 1]))
def call(number):
    start.wait()
    found[number] = [threads.parallel_map(work, range(number, number + 5)) for _ in range(20)]
callers = [threading.Thread(target=call, args=[number], daemon=True) for number in range(8)]
for caller in callers:
    caller.start()
for caller in callers:
    caller.join(10)
    if caller.is_alive():
        os._exit(3)
if found != {number: [[item + 2 for item in range(number, number + 5)]] * 20 for number in range(8)}:
    raise SystemExit(f"found {found}")
"""


def test_more_callers_than_threads_of_the_pool():
    pytest.importorskip("threadpoolctl")
    run_program(CALLERS)


# --- set_num_threads ---------------------------------------------------------------


def test_set_num_threads_overrides_the_environment(monkeypatch, three_blas_threads):
    monkeypatch.setattr(threads, "_requested", None)
    monkeypatch.setenv("XFORMER_NUM_THREADS", "7")
    assert xformer.num_threads() == 7
    xformer.set_num_threads(2)
    assert xformer.num_threads() == 2
    assert set(blas_pools()) == {2}
    xformer.set_num_threads(4)
    assert set(blas_pools()) == {4}


@pytest.mark.parametrize("count", [0, -1, 2.0, "2", None, True, 4097])
def test_a_bad_number_of_threads_cannot_be_set(monkeypatch, count):
    monkeypatch.setattr(threads, "_requested", 3)
    with pytest.raises(ConfigError, match=rf"^set_num_threads got {count!r}; expected an integer from 1 to 4096$"):
        xformer.set_num_threads(count)
    assert xformer.num_threads() == 3


def test_set_num_threads_warns_without_threadpoolctl(monkeypatch, three_blas_threads, no_threadpoolctl):
    monkeypatch.setattr(threads, "_requested", None)
    with pytest.warns(
        UserWarning, match="^set_num_threads has no effect on NumPy's matrix products: install threadpoolctl$"
    ):
        xformer.set_num_threads(2)
    assert xformer.num_threads() == 2
    assert set(blas_pools()) == {3}


# Prints whether set_num_threads loads torch, then the threads of linear algebra or torch, at first three, before and
# after an operation.
FIRST_ARRAYS = """
import importlib, json, sys
import xformer
if sys.argv[1] != "none":
    xformer.set_num_threads(int(sys.argv[1]))
loaded = "torch" in sys.modules
import numpy, threadpoolctl
from xformer.ops import softmax
library = importlib.import_module(sys.argv[2])
threadpoolctl.threadpool_limits(3, user_api="blas")
if library is not numpy:
    library.set_num_threads(3)
def threads():
    if library is not numpy:
        return library.get_num_threads()
    return max(pool["num_threads"] for pool in threadpoolctl.threadpool_info() if pool["user_api"] == "blas")
before = threads()
softmax(library.ones((2, 3)))
print(json.dumps([loaded, before, threads()]))
"""


@pytest.mark.parametrize(
    ("library", "explicit", "variable", "expected"),
    [
        ("numpy", "2", "", 2),
        ("numpy", "5", "2", 5),
        ("numpy", "none", "2", 2),
        ("numpy", "none", "5", 3),
        ("numpy", "none", "", 3),
        ("torch", "5", "", 5),
        ("torch", "none", "2", 2),
    ],
)
def test_libraries_follow_with_their_first_array(library, explicit, variable, expected):
    pytest.importorskip("threadpoolctl")
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    result = run_program(FIRST_ARRAYS, explicit, library, env={**os.environ, "XFORMER_NUM_THREADS": variable})
    assert json.loads(result) == [False, 3, expected]


# --- Forks -------------------------------------------------------------------------

needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")


# in_child(check) forks, and raises unless check() is true in the child, within a minute.
FORKING = """
import os, signal, sys, threading, traceback, warnings
warnings.simplefilter("ignore", DeprecationWarning)  # newer Pythons warn of forks beside threads
import numpy as np
import threadpoolctl
import xformer
from xformer import threads

def in_child(check):
    child = os.fork()
    if child == 0:
        code = 1
        try:
            signal.alarm(60)
            code = 0 if check() else 2
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code:
        raise SystemExit(f"the child ended with {code}")

def blas():
    return {pool["num_threads"] for pool in threadpoolctl.threadpool_info() if pool["user_api"] == "blas"}

def inside(block, leave):
    entered = threading.Event()
    def live():
        with block:
            entered.set()
            leave.wait(30)
    threading.Thread(target=live, daemon=True).start()
    entered.wait(30)

xformer.set_num_threads(2)
"""
POOL = """
threads.parallel_map(abs, [-1, -2])
in_child(lambda: threads.parallel_map(abs, [-1, -2]) == [1, 2])
"""
LIMITS = """
leave = threading.Event()
inside(threads.blas_threads(1), leave)
in_child(lambda: blas() == {2})

def with_limits_of_its_own():
    with threads.blas_threads(2):
        with threads.blas_threads(1):
            one = blas() == {1}
        return one and blas() == {2}

in_child(with_limits_of_its_own)
with threads.blas_threads(1):
    in_child(lambda: blas() == {1} and threads.parallel_map(abs, [-1, -2]) == [1, 2] and blas() == {1})
    leave.set()
def inside_and_out():
    with threads.blas_threads(1):
        child = os.fork()
        here = blas() == {1}
    if not (here and blas() == {2}):
        os._exit(3)
    if child == 0:
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
in_child(inside_and_out)
"""
LOCK = """
import time
lock = threads.fork_safe_lock()
class Slow:
    def wait(self, seconds):
        time.sleep(0.3)
inside(lock, Slow())
inside(threads._LOCK, Slow())
def free():
    taken = []
    for each in (lock, threads._LOCK):
        thread = threading.Thread(target=lambda: taken.append(each.acquire(timeout=5)))
        thread.start()
        thread.join()
    return taken == [True, True]
in_child(free)
"""
# While other threads attend, forked processes attend to the same, on threads of their own.
BUSY = """
import multiprocessing
os.environ["XFORMER_KERNELS"] = "no-native"
from xformer.ops import attention
query, key, value = np.random.default_rng(0).standard_normal((3, 2, 2, 160, 16), dtype="float32")
def loss(arrays):
    out = attention(*arrays)
    return xformer.array_namespace(out).sum(out * out)
def attend():
    return xformer.grad(loss)((query, key, value))
assert ": numpy.flash_attention" in xformer.ops.explain(
    "attention", query, key, value, None, None, None, causal=False, scale=1.0, keep_probability=1.0)
expected = attend()
def same(number=0):
    return all(np.array_equal(a, b) for a, b in zip(attend(), expected, strict=True))
stop = threading.Event()
def work():
    while not stop.is_set():
        attend()
workers = [threading.Thread(target=work) for _ in range(3)]
for worker in workers:
    worker.start()
for _ in range(8):
    in_child(same)
with multiprocessing.get_context("fork").Pool(2) as pool:
    assert pool.map_async(same, range(4)).get(timeout=60) == [True] * 4
stop.set()
for worker in workers:
    worker.join()
assert same() and blas() == {2}
"""


NATIVE = BUSY.replace("no-native", "auto").replace("numpy.flash_attention", "native.attention")
PROGRAMS = {"pool": POOL, "limits": LIMITS, "lock": LOCK, "busy": BUSY}
if native.is_available():
    PROGRAMS["native"] = NATIVE


@needs_fork
@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_a_forked_process_computes(program):
    pytest.importorskip("threadpoolctl")
    run_program(FORKING + program)
