"""Compilation of numba kernels: when it happens, its cache, and what runs without it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading

import numpy as np
import pytest

numba = pytest.importorskip("numba")

from xformer.ops._numba import compile  # noqa: E402 - needs numba


@pytest.fixture(autouse=True)
def enable_kernels(monkeypatch):
    monkeypatch.setenv("XFORMER_KERNELS", "auto")


BROKEN = """
import sys
import numpy as np
sys.modules["numba"] = None
import importlib.util
find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name: object() if name == "numba" else find_spec(name)
from xformer.ops import explain, relu
assert "numba" not in explain("relu", np.ones(3, "float32"))
relu(np.ones(3, "float32"))
"""


def test_other_kernels_run_if_numba_cannot_be_imported():
    environment = {**os.environ, "XFORMER_KERNELS": "auto"}
    done = subprocess.run([sys.executable, "-c", BROKEN], env=environment, check=True, capture_output=True, text=True)
    assert re.fullmatch(r"the kernels in xformer/ops/\*/numba.py are switched off: .*numba.*\n", done.stderr)


PROGRAM = """
import sys
import numpy as np
from xformer.ops import explain
from xformer.ops import relu
relu(np.ones(3, "float32"))
assert ": numpy.relu" in explain("relu", np.ones(3, "float32"))
assert "numba" not in sys.modules
"""


def test_numba_is_not_imported_if_its_kernels_are_disabled(monkeypatch):
    monkeypatch.setenv("XFORMER_KERNELS", "no-jit")
    subprocess.run([sys.executable, "-c", PROGRAM], check=True)


def scaled(x, scale, y):
    for i in range(x.size):
        y[i] = x[i] * scale


def test_concurrent_first_calls_compile_a_kernel_once(monkeypatch):
    kernel = compile.kernel(compile.in_array(1), numba.float32, compile.out_array(1))(scaled)
    builds, build = [], compile._Kernel._build
    monkeypatch.setattr(kernel, "_build", lambda cache: builds.append(cache) or build(kernel, cache=False))
    x, results = np.arange(9.0, dtype="float32"), np.zeros((4, 9), "float32")
    threads = [threading.Thread(target=kernel, args=(x, 2.0, y)) for y in results]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert builds == [True]
    np.testing.assert_array_equal(results, np.tile(2.0 * x, (4, 1)))


def test_a_kernel_runs_without_a_cache_directory(monkeypatch, caplog):
    caplog.set_level("INFO", logger="xformer")
    monkeypatch.setattr(numba.core.caching.CacheImpl, "_locator_classes", [])
    kernel = compile.kernel(compile.in_array(1), numba.float32, compile.out_array(1))(scaled)
    x, y = np.arange(9.0, dtype="float32"), np.zeros(9, "float32")
    kernel(x, 3.0, y)
    np.testing.assert_array_equal(y, np.float32(3.0) * x)
    assert caplog.messages[-1].endswith(" s; no cache directory is writable")


def test_other_kernels_run_if_compilation_is_disabled():
    program = """
from xformer.ops import explain
import numpy as np
assert "numba" not in explain("relu", np.ones(3, "float32"))
"""
    environment = {**os.environ, "NUMBA_DISABLE_JIT": "1", "XFORMER_KERNELS": "auto"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, check=True, capture_output=True, text=True)
    assert done.stderr == "the kernels in xformer/ops/*/numba.py are switched off: NUMBA_DISABLE_JIT is set\n"


LOGGING = """
import logging, sys
import numpy as np
logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
from xformer.ops import relu
relu(np.ones(3, "float32"))
"""


def test_compilation_is_logged_and_cached(tmp_path):
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path), "XFORMER_KERNELS": "auto"}
    runs = [
        subprocess.run([sys.executable, "-c", LOGGING], env=environment, check=True, capture_output=True, text=True)
        for _ in range(2)
    ]
    assert re.fullmatch(r"compiled relu for this processor in [0-9.]+ s, cached for later runs\n", runs[0].stdout)
    assert runs[1].stdout == ""
