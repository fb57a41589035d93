"""What libraries say when memory runs out becomes one phrase; what is no such error stays what it is."""

from __future__ import annotations

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
        size = 4096 * int(Path("/proc/self/statm").read_text().split()[0])
        monkeypatch.setattr(memory.resource, "getrlimit", lambda kind: (size, size))  # nothing is free
    with (
        pytest.raises(OutOfMemoryError, match=r"; \d+\.\d$"),
        enough_memory("it", lambda most: told.append(most) or str(most)),
    ):
        np.empty(2**50, dtype="uint8")
    assert told[0] > held.nbytes
