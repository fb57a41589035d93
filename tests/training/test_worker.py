"""Worker processes: what happens when one dies, and that none is left behind."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from xformer.backends import array_namespace
from xformer.errors import TrainingError
from xformer.shared_memory import can_share_memory
from xformer.training.worker import WorkerPool

pytestmark = pytest.mark.skipif(not can_share_memory(), reason="the system cannot share anonymous memory")


def product(model, factor, rng):
    """A loss that the worker finds by name: d/dx of the sum of factor * x."""
    xp = array_namespace(*model)
    return xp.sum(model[0] * factor) + xp.sum(model[1])


def leave(model, factor, rng):
    """A loss that takes the worker with it."""
    os._exit(3)


def model():
    return (np.asarray([1.0, 2.0, 3.0]), np.asarray([[1.0]], dtype="float32").astype("float64"))


def here(item):
    return None, None


def answer(team, factor):
    return team.differentiate(model(), [(0.0, None), (factor, None)], here)[1]


def pids(team):
    return [worker._process.pid for worker in team._workers]


def is_alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.fixture
def team():
    made = WorkerPool(product, model(), 1)
    yield made
    made.close()


def test_a_worker_answers_in_shared_memory(team):
    value, gradients = answer(team, 2.0)
    assert float(value) == 13.0
    np.testing.assert_array_equal(gradients[0], [2.0, 2.0, 2.0])
    np.testing.assert_array_equal(gradients[1], [[1.0]])
    again = answer(team, 3.0)[1]
    assert np.shares_memory(gradients[0], again[0])


def test_a_team_fits_models_of_the_same_shapes(team):
    assert team.fits(model(), 1)
    assert not team.fits(model(), 2)
    assert not team.fits(model()[::-1], 1)
    assert not team.fits(tuple(leaf.astype("float32") for leaf in model()), 1)


def test_the_worker_runs_one_blas_thread_and_keeps_its_process_group(team):
    (pid,) = pids(team)
    with open(f"/proc/{pid}/environ", "rb") as file:
        assert b"OPENBLAS_NUM_THREADS=1" in file.read().split(b"\0")
    assert os.getpgid(pid) != os.getpgid(0)  # Ctrl-C in the terminal does not reach it


def test_a_dead_worker_is_reported(team):
    answer(team, 2.0)
    os.kill(pids(team)[0], signal.SIGKILL)
    for _ in range(2):  # whether sending or receiving notices first
        with pytest.raises(TrainingError, match=r"^a worker process ended with code -9"):
            answer(team, 2.0)


def test_a_worker_that_dies_at_work_is_reported():
    team = WorkerPool(leave, model(), 1)
    with pytest.raises(TrainingError, match=r"^a worker process ended with code 3"):
        answer(team, 2.0)
    team.close()


def test_a_function_that_the_worker_cannot_find_is_reported(capfd):
    function = type("Elsewhere", (), {"__module__": "no_such_module", "__call__": product, "__reduce__": unfindable})()
    team = WorkerPool(function, model(), 1)
    with pytest.raises(TrainingError, match=r"^a worker process ended with code 1; its last words are above"):
        answer(team, 2.0)
    assert "No module named 'no_such_module'" in capfd.readouterr().err
    team.close()


def unfindable(self):
    return __import__, ("no_such_module",)


def test_workers_end_with_the_team():
    team = WorkerPool(product, model(), 2)
    running = pids(team)
    assert all(map(is_alive, running))
    team.close()
    assert not any(map(is_alive, running))


def test_workers_end_when_the_team_is_forgotten():
    team = WorkerPool(product, model(), 1)
    running = pids(team)
    del team
    gc.collect()
    assert not any(map(is_alive, running))


# A forked process has copies of the pipes, and lives on while the team is closed; it ends, and the team works.
FORKS = """
import os, sys, warnings
from tests.training.test_worker import answer, model, product
from xformer.training.worker import WorkerPool
warnings.simplefilter("ignore", DeprecationWarning)
team, ended = WorkerPool(product, model(), 1), WorkerPool(product, model(), 1)
read, write = os.pipe()
other = os.fork()
if other == 0:
    os.close(write)
    own = WorkerPool(product, model(), 1)
    good = not team.fits(model(), 1) and own.fits(model(), 1) and float(answer(own, 2.0)[0]) == 13.0
    os.read(read, 1)  # until the other process ends
    sys.exit(0 if good else 1)
child = os.fork()
if child == 0:
    sys.exit(0)  # with all that is to be done at the end of a process
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert float(answer(team, 2.0)[0]) == 13.0
ended.close()
os.close(write)
assert os.waitstatus_to_exitcode(os.waitpid(other, 0)[1]) == 0
team.close()
"""


def test_forked_processes_leave_the_team_alone():
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", FORKS], cwd=root, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")


def test_workers_close_their_descriptors():
    before = len(os.listdir("/proc/self/fd"))
    WorkerPool(product, model(), 2).close()
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before
