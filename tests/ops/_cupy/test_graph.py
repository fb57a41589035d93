"""Capture and replay of CUDA graphs, on a GPU if there is one, else on a fake that logs its calls."""

from __future__ import annotations

import contextlib
import importlib
import sys
import types

import numpy as np
import pytest

from tests.conftest import library_or_skip
from xformer.backends import from_host, resolve, to_host
from xformer.kernels.cupy import cublas
from xformer.ops import linear


class Stream:
    """A stream that can capture: what is done meanwhile is written down, and the graph does it."""

    def __init__(self, diary, broken=False):
        self.diary, self.broken, self.capturing = diary, broken, False

    def __enter__(self):
        self.diary.append("in")

    def __exit__(self, *error):
        self.diary.append("out")

    def record(self):
        return "event"

    def wait_event(self, event):
        assert event == "event"

    def begin_capture(self):
        self.capturing = True

    def end_capture(self):
        self.capturing = False
        if self.broken:
            raise RuntimeError("cudaErrorStreamCaptureInvalidated")
        return types.SimpleNamespace(launch=lambda stream: self.diary.append("launch"))


@pytest.fixture
def diary():
    return []


@pytest.fixture(params=[False, True], ids=["sound", "broken"])
def record(request, diary, monkeypatch):
    """`record` on a stand-in for CuPy."""
    stream = Stream(diary, request.param)
    cuda = types.SimpleNamespace(
        MemoryPool=lambda: types.SimpleNamespace(malloc=lambda size: types.SimpleNamespace(ptr=4096)),
        runtime=types.SimpleNamespace(getDevice=lambda: 0),
        Stream=lambda non_blocking: stream,
        get_current_stream=lambda: Stream([]),
        using_allocator=lambda malloc: contextlib.nullcontext(),
    )
    fake = types.ModuleType("cupy")
    fake.cuda = cuda
    monkeypatch.setitem(sys.modules, "cupy", fake)
    monkeypatch.delitem(sys.modules, "xformer.kernels.cupy.graph", raising=False)
    yield importlib.import_module("xformer.kernels.cupy.graph").capture_graph, stream
    sys.modules.pop("xformer.kernels.cupy.graph", None)


def test_the_third_call_captures_the_graph(record, diary):
    make, stream = record
    again = make(lambda: diary.append("captured" if stream.capturing else "done"))
    for _ in range(2):
        again()
    assert [entry for entry in diary if entry not in ("in", "out")] == ["done", "done"]
    if stream.broken:
        with pytest.warns(UserWarning, match=r"cannot be captured as a CUDA graph.*cudaErrorStreamCapture"):
            again()
        again()
        expected = ["captured", "done", "done"]
    else:
        again()
        again()
        expected = ["captured", "launch", "launch"]
    assert [entry for entry in diary if entry not in ("in", "out")][2:] == expected
    assert diary.count("in") == diary.count("out") == 4


@pytest.mark.parametrize("record", [False], indirect=True, ids=["sound"])
def test_a_function_that_cannot_be_captured_runs_as_usual(record, diary):
    make, stream = record

    def work():
        if stream.capturing:
            raise RuntimeError("a copy to the host")
        diary.append("done")

    again = make(work)
    again()
    again()
    with pytest.warns(UserWarning, match="a copy to the host"):
        again()
    again()
    assert diary.count("done") == 4
    assert not stream.capturing


@pytest.mark.parametrize("record", [False], indirect=True, ids=["sound"])
def test_the_memory_of_a_dropped_graph_is_reused(record):
    make, _ = record
    first, second = make(print), make(print)
    assert first._resources.pool is not second._resources.pool
    dropped = first._resources
    del first
    assert make(print)._resources is dropped


@pytest.mark.parametrize("record", [False], indirect=True, ids=["sound"])
def test_products_of_a_graph_share_a_workspace(record):
    make, _ = record
    workspaces = []
    make(lambda: workspaces.append(cublas._captured.workspace))()
    assert workspaces == [(4096, 32 << 20)]
    assert cublas._captured.workspace is None


@pytest.mark.parametrize("name", ["numpy", "array_api_strict"])
def test_other_libraries_have_no_graph_capture(name):
    assert resolve(name).graph_capture() is None


@pytest.mark.gpu
def test_a_graph_gives_the_same_results():
    xp = library_or_skip("cupy")
    total, steps = xp.zeros(3), xp.asarray([1.0, 2.0, 3.0])

    def work():
        total[...] = total + steps * steps

    again = xp.graph_capture()(work)
    for _ in range(7):
        again()
    assert total.get().tolist() == [7.0, 28.0, 63.0]


@pytest.mark.gpu
def test_graphs_give_their_memory_back():
    xp = library_or_skip("cupy")
    x, free = xp.ones((1024, 1024)), []

    def work():
        x[...] = x + 1.0

    for _ in range(50):
        again = xp.graph_capture()(work)
        for _ in range(4):
            again()
        del again
        xp.cuda.Device().synchronize()
        free.append(xp.cuda.runtime.memGetInfo()[0])
    assert free[-1] == free[5]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_products_can_be_captured(dtype):
    """CuPy's own binding of cuBLAS cannot be captured; its warning would be an error here."""
    xp = library_or_skip("cupy")
    x, weight, bias = (from_host(xp, np.ones(shape), dtype=dtype) for shape in ((3, 8), (8, 8), (8,)))
    found = xp.zeros_like(x)

    def work():
        found[...] = linear(linear(x, weight, bias), weight)

    again = xp.graph_capture()(work)
    for value in range(5):
        x[...] = value
        again()
        assert to_host(found).tolist() == [[8.0 * (8.0 * value + 1.0)] * 8] * 3
