"""Capture and replay of CUDA graphs, on a GPU if there is one, else on a fake that logs its calls."""

from __future__ import annotations

import contextlib
import gc
import importlib
import sys
import threading
import types
import weakref

import numpy as np
import pytest

from tests.conftest import library_or_skip
from xformer.backends import from_host, resolve, to_host
from xformer.kernels.cupy import cublas
from xformer.ops import linear


class Stream:
    """A stream that can capture: what is done meanwhile is written down, and the graph does it."""

    def __init__(self, diary=None, broken=False):
        self.diary, self.broken, self.capturing = [] if diary is None else diary, broken, False
        self.ptr, self.outer = id(self), []

    def __enter__(self):
        self.diary.append("in")
        self.outer.append(CUDA.stream)
        CUDA.stream = self

    def __exit__(self, *error):
        self.diary.append("out")
        CUDA.stream = self.outer.pop()

    def record(self, event):
        self.diary.append("record")

    def wait_event(self, event):
        assert event.disable_timing

    def begin_capture(self):
        assert not self.capturing
        self.capturing = True

    def end_capture(self):
        self.capturing = False
        if self.broken:
            raise RuntimeError("cudaErrorStreamCaptureInvalidated")
        return types.SimpleNamespace(launch=lambda stream: self.diary.append("launch"))


class CUDARuntimeError(RuntimeError):
    """As CuPy's."""


class Memory:
    """A block that cudaMalloc returns."""

    def __init__(self, size):
        self.size = size
        if sum(block.size for block in CUDA.blocks) + size > CUDA.limit:
            raise CUDARuntimeError("cudaErrorMemoryAllocation: out of memory")
        CUDA.blocks.add(self)


class Chunk:
    """A part of a block, with its neighbors."""

    def __init__(self, memory, size):
        self.memory, self.size, self.previous, self.next = memory, size, None, None

    def split(self, size):
        if size == self.size:
            return []
        rest = Chunk(self.memory, self.size - size)
        rest.previous, rest.next, self.next, self.size = self, self.next, rest, size
        if rest.next is not None:
            rest.next.previous = rest
        return [rest]

    def merge(self, other):
        self.size, self.next = self.size + other.size, other.next
        if other.next is not None:
            other.next.previous = self


class Pointer:
    ptr = 4096


class Pool:
    """A pool that splits and merges blocks as that of CuPy: the smallest chunk that is large enough."""

    def __init__(self, allocator):
        self.allocator, self.free_chunks, self.used = allocator, [], []

    def malloc(self, size):
        size = -(-size // 512) * 512
        chunk = min((each for each in self.free_chunks if each.size >= size), key=lambda each: each.size, default=None)
        if chunk is None:
            chunk = Chunk(self.new_block(size), size)
        else:
            self.free_chunks.remove(chunk)
            self.free_chunks += chunk.split(size)
        self.used.append(chunk)
        pointer = Pointer()
        weakref.finalize(pointer, self.release, chunk).atexit = False
        return pointer

    def new_block(self, size):
        try:
            return self.allocator(size)[0]
        except CUDARuntimeError:
            self.free_all_blocks()  # also blocks that graphs use
            raise

    def release(self, chunk):
        self.used.remove(chunk)
        if chunk.next in self.free_chunks:
            self.free_chunks.remove(chunk.next)
            chunk.merge(chunk.next)
        if chunk.previous in self.free_chunks:
            chunk.previous.merge(chunk)
        else:
            self.free_chunks.append(chunk)

    def free_all_blocks(self):
        CUDA.frees.append("own")
        self.free_chunks = [each for each in self.free_chunks if each.previous or each.next]


CUDA = types.SimpleNamespace()  # the state of the stand-in


@contextlib.contextmanager
def using_allocator(malloc):
    outer, CUDA.malloc = CUDA.malloc, malloc
    yield
    CUDA.malloc = outer


@pytest.fixture
def diary():
    return []


@pytest.fixture(params=[False, True], ids=["sound", "broken"])
def record(request, diary, monkeypatch):
    """`CapturedGraph` on a stand-in for CuPy, and the streams that it makes."""
    streams = []
    CUDA.stream, CUDA.malloc, CUDA.limit, CUDA.frees = Stream(), None, 2**60, []
    CUDA.blocks = weakref.WeakSet()  # that were not freed
    default = types.SimpleNamespace(malloc=None, free_all_blocks=lambda: CUDA.frees.append("default"))
    fake = types.ModuleType("cupy")
    fake.get_default_memory_pool = lambda: default
    fake.cuda = types.SimpleNamespace(
        MemoryPool=Pool,
        Memory=Memory,
        MemoryPointer=lambda memory, offset: (memory, offset),
        Event=lambda disable_timing: types.SimpleNamespace(disable_timing=disable_timing),
        Device=lambda number: contextlib.nullcontext(),
        memory=types.SimpleNamespace(OutOfMemoryError=lambda *sizes: MemoryError(sizes)),
        runtime=types.SimpleNamespace(getDevice=lambda: 0, CUDARuntimeError=CUDARuntimeError),
        Stream=lambda non_blocking: streams.append(Stream(diary, request.param)) or streams[-1],
        get_current_stream=lambda: CUDA.stream,
        using_allocator=using_allocator,
    )
    monkeypatch.setitem(sys.modules, "cupy", fake)
    monkeypatch.delitem(sys.modules, "xformer.kernels.cupy.graph", raising=False)
    yield importlib.import_module("xformer.kernels.cupy.graph").CapturedGraph, streams
    sys.modules.pop("xformer.kernels.cupy.graph", None)


sound = pytest.mark.parametrize("record", [False], indirect=True, ids=["sound"])


def work_of(diary):
    return [entry for entry in diary if entry not in ("in", "out", "record")]


def test_the_third_call_captures_the_graph(record, diary):
    make, streams = record
    again = make(lambda copy: diary.append("captured" if streams[0].capturing else "done"))
    for _ in range(2):
        again()
    assert work_of(diary) == ["done", "done"]
    if streams[0].broken:
        with pytest.warns(UserWarning, match=r"cannot be captured as a CUDA graph.*cudaErrorStreamCapture"):
            again()
        again()
        expected = ["captured", "done", "done"]
    else:
        again()
        again()
        expected = ["captured", "launch", "launch"]
    assert work_of(diary)[2:] == expected
    assert diary.count("in") == diary.count("out")


@sound
@pytest.mark.parametrize(
    "error", [RuntimeError("a copy\nto the host"), KeyError("plan"), KeyboardInterrupt()], ids=repr
)
def test_an_error_ends_the_capture(record, diary, error):
    """Ctrl-C ends the call, too; anything else is what cannot be captured. Later graphs do not get the stream."""
    make, streams = record

    def work(copy):
        if streams[0].capturing:
            raise error
        diary.append("done")

    again = make(work)
    again()
    again()
    if isinstance(error, Exception):
        with pytest.warns(UserWarning, match=r"runs without one: (a copy to the host|'plan')$"):
            again()
        again()
        assert diary.count("done") == 4
    else:
        with pytest.raises(KeyboardInterrupt):
            again()
    assert not streams[0].capturing
    assert CUDA.stream is not streams[0]
    make(lambda copy: None)()
    assert len(streams) == 2


@sound
def test_a_graph_inside_of_another_is_part_of_it(record, diary):
    make, streams = record
    inner = make(lambda copy: diary.append("captured" if streams[0].capturing else "done"))
    outer = make(lambda copy: inner())
    for _ in range(4):
        outer()
    assert work_of(diary) == ["done", "done", "captured", "launch", "launch"]
    assert len(streams) == 1


def allocate(*sizes):
    """Return a function that uses arrays one after the other, two of them at the same time."""

    def work(copy):
        kept = None
        for size in sizes:
            kept = kept, CUDA.malloc(size)
            kept = kept[1]
        del kept

    return work


def device_memory():
    gc.collect()
    return sum(block.size for block in CUDA.blocks)


SHAPES = [(rows, length) for length in range(8, 66, 2) for rows in [32_768 // length // 8 * 8]]


@sound
def test_all_graphs_share_memory_of_the_largest_one(record):
    """The shapes of a corpus have about the same number of tokens; the order of 29 of them is random."""
    make, _ = record
    sizes = [(rows * length * 2048, rows * length * 64_000, rows * rows * 64) for rows, length in SHAPES]
    largest = 0
    for size in sizes:
        again = make(allocate(*size))
        again()
        del again
        largest = max(largest, device_memory_of_one(make, size))
    graphs = [make(allocate(*sizes[index])) for index in np.random.default_rng(0).permutation(len(sizes))]
    for again in graphs:
        for _ in range(4):
            again()
    assert len(graphs) == 29
    assert device_memory() < 1.25 * largest
    del graphs, again
    assert device_memory() == 0


def device_memory_of_one(make, sizes):
    again = make(allocate(*sizes))
    again()
    return device_memory()


@sound
def test_the_pool_of_cupy_is_freed_before_the_first_call_of_each_graph(record):
    make, _ = record
    for again in (make(allocate(512)), make(allocate(512))):
        for _ in range(4):
            again()
    assert CUDA.frees == ["default"] * 2


@sound
def test_graphs_are_captured_again_when_memory_has_run_out(record, diary):
    make, _ = record
    small, large = make(allocate(2**20)), make(allocate(2**30))
    for _ in range(4):
        small()
    CUDA.limit = 2**29
    with pytest.raises(MemoryError):
        large()
    assert device_memory() == 0
    before = work_of(diary).count("launch")
    for _ in range(4):
        small()
    assert work_of(diary).count("launch") == before + 2
    assert device_memory() > 2**20


@sound
def test_threads_have_streams_of_their_own(record):
    make, streams = record
    graphs = []
    for _ in range(2):
        thread = threading.Thread(target=lambda: graphs.append(make(lambda copy: None)))
        thread.start()
        thread.join()
    assert len(streams) == 2
    graphs[0]()  # by another thread than that which made it


@sound
def test_products_of_a_graph_share_a_workspace(record):
    make, _ = record
    workspaces = []
    make(lambda copy: workspaces.append(cublas.WORKSPACE.get()))()
    assert workspaces == [(4096, 32 << 20)]
    assert cublas.WORKSPACE.get() is None


@pytest.mark.parametrize("name", ["numpy", "array_api_strict"])
def test_other_libraries_have_no_graph_capture(name):
    assert resolve(name).graph_capture() is None


@pytest.mark.gpu
def test_a_graph_gives_the_same_results():
    xp = library_or_skip("cupy")
    total, steps = xp.zeros(3), xp.asarray([1.0, 2.0, 3.0])

    def work(copy):
        total[...] = total + steps * steps

    again = xp.graph_capture()(work)
    for _ in range(7):
        again()
    assert total.get().tolist() == [7.0, 28.0, 63.0]


@pytest.mark.gpu
def test_graphs_give_their_memory_back():
    xp = library_or_skip("cupy")
    x, free = xp.ones((1024, 1024)), []

    def work(copy):
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

    def work(copy):
        found[...] = linear(linear(x, weight, bias), weight)

    again = xp.graph_capture()(work)
    for value in range(5):
        x[...] = value
        again()
        assert to_host(found).tolist() == [[8.0 * (8.0 * value + 1.0)] * 8] * 3
