"""What libraries say when memory runs out becomes one phrase; what is no such error stays what it is."""

from __future__ import annotations

import os
import re
import sys
import types
from pathlib import Path

import numpy as np
import pytest

from xformer import memory
from xformer.errors import OutOfMemoryError
from xformer.memory import enough_memory, shortage


def asked_too_much(library):
    """The error of a library that is asked for a petabyte."""
    try:
        if library == "numpy":
            np.empty(2**50, dtype="uint8")
        elif library == "torch":
            pytest.importorskip("torch").empty(2**50, dtype=pytest.importorskip("torch").uint8)
        elif library == "cupy":
            raise pytest.importorskip("cupy").cuda.memory.OutOfMemoryError(2**50, 2**30, 0)
        else:
            pytest.importorskip("jax").numpy.zeros(2**50, dtype="uint8").block_until_ready()
    except (MemoryError, RuntimeError) as error:
        return error
    raise AssertionError("there was enough")


@pytest.mark.parametrize("library", ["numpy", "torch", "cupy", "jax"])
def test_what_was_asked_for_and_what_is_free(library):
    phrase = shortage(asked_too_much(library))
    assert phrase.startswith("1.0 PiB was asked for")
    if library in ("numpy", "torch"):
        assert phrase.endswith(" is free on this machine")


@pytest.mark.parametrize("said", ["CUDA out of memory. Tried to allocate 20.50 GiB. GPU 0 has 3 GiB", ""])
def test_an_error_of_that_name(said):
    error = type("OutOfMemoryError", (RuntimeError,), {})(said)
    assert shortage(error).startswith("20.5 GiB was asked for" if said else "more was asked for than there is")


def test_a_library_that_does_not_fit():
    def load():
        try:
            raise OSError("libx.so: failed to map segment from shared object")
        except OSError:
            raise OSError("could not load libx.so")  # noqa: B904 - as llvmlite does

    with pytest.raises(OSError, match="could not load") as caught:
        load()
    assert shortage(caught.value).startswith("more was asked for than there is (failed to map segment), and ")
    assert "no thread could be started" in shortage(RuntimeError("can't start new thread"))


def test_what_was_raised_before_is_another_matter():
    def read():
        try:
            raise RuntimeError("RESOURCE_EXHAUSTED")
        except RuntimeError:
            Path("there is no such file").read_bytes()

    with pytest.raises(FileNotFoundError) as caught:
        read()
    assert shortage(caught.value) is None


def test_other_errors_pass_through():
    assert shortage(RuntimeError("a pullback was used before")) is None
    with pytest.raises(RuntimeError, match="used before"), enough_memory("it", str):
        raise RuntimeError("a pullback was used before")


def test_the_advice_comes_last():
    with (
        pytest.raises(OutOfMemoryError, match=r"^update 3 ran out of memory: more was asked for.*; sleep on it$"),
        enough_memory("update 3", lambda most: "sleep on it"),
    ):
        raise MemoryError


@pytest.mark.parametrize("limited", [False, True])
def test_what_a_process_could_have_is_what_is_free_and_what_it_holds(monkeypatch, limited):
    held, told = np.ones(2**24), []
    if limited:
        size = os.sysconf("SC_PAGE_SIZE") * int(Path("/proc/self/statm").read_text().split()[0])
        monkeypatch.setattr(memory.resource, "getrlimit", lambda kind: (size, size))  # nothing is free
    with (
        pytest.raises(OutOfMemoryError, match=r"; \d+\.\d$"),
        enough_memory("it", lambda most: told.append(most) or str(most)),
    ):
        np.empty(2**50, dtype="uint8")
    free = int(re.search(r"MemAvailable:\s+(\d+)", Path("/proc/meminfo").read_text())[1]) * 1024
    assert told[0] > held.nbytes + (0 if limited else 0.8 * free)


def test_what_a_process_could_have_on_a_gpu(monkeypatch):
    """The pool's blocks that are in use count as held."""
    pool = types.SimpleNamespace(free_bytes=lambda: 2.0, used_bytes=lambda: 4.0)
    runtime = types.SimpleNamespace(memGetInfo=lambda: (1.0, 100.0))
    cupy = types.SimpleNamespace(cuda=types.SimpleNamespace(runtime=runtime), get_default_memory_pool=lambda: pool)
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    error = type("OutOfMemoryError", (MemoryError,), {"__module__": "cupy.cuda.memory"})
    with (
        pytest.raises(OutOfMemoryError, match=r"and 3 bytes is free on the GPU; 7\.0$"),
        enough_memory("it", lambda most: str(most)),
    ):
        raise error("Out of memory allocating 1,024 bytes")


def test_too_little_memory_to_see_how_much_there_is(monkeypatch):
    def read_text(*_, **__):
        raise MemoryError

    monkeypatch.setattr(memory.Path, "read_text", read_text)
    assert shortage(MemoryError()) == "more was asked for than there is"
