"""Loading the native library, what it reads from arrays, and programs of its operations."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.reference import compiled_levels, for_each
from xformer import native
from xformer import native as library
from xformer.errors import ShapeError
from xformer.native import build
from xformer.threads import blas_threads

needs_library = pytest.mark.skipif(not native.is_available(), reason="the library was not compiled")
LEVELS = ["baseline", "avx2", "avx512"]


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])} | environment
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=100)


class Program:
    """Records that are run together; keeps their arrays."""

    def __init__(self) -> None:
        self.pointer = library.LIB.xf_program()
        self.arrays: list[Any] = []

    def append(self, name: str, arrays: tuple[Any, ...], *integers: int) -> bytes | None:
        self.arrays.append(arrays)
        integers = (*integers, *[0] * (4 - len(integers)))
        return library.LIB.xf_append(self.pointer, library.OPERATIONS[name], arrays, *integers, *[0.0] * 4)

    def close(self) -> int:
        return library.LIB.xf_close(self.pointer)

    def run(self, threads: int) -> bytes | None:
        return library.LIB.xf_run(self.pointer, threads, 1)

    def free(self) -> None:
        library.LIB.xf_free(self.pointer)


@pytest.fixture
def program() -> Iterator[Program]:
    program = Program()
    yield program
    program.free()


# --- loading ----------------------------------------------------------------------------------------------------------

_SUM = """
import numpy as np
from xformer import native
x = np.arange(100, dtype=np.float32)
out = np.empty((), np.float32)
if native.is_available():
    native.call("sum", (x, out), 1)
print(native.level(), native.WHY_NOT, out if native.is_available() else "", native.zeros((2,), "float32"),
      native.contiguous(x[::50], np.float64), sep="|")
"""


@needs_library
@for_each("level", LEVELS)
def test_levels(level: str) -> None:
    result = run_python(_SUM, XFORMER_NATIVE=level)
    assert not result.stderr
    if LEVELS.index(level) > LEVELS.index(next(iter(build._best_level()))):
        assert result.stdout == f"|this processor has no {level}||[0. 0.]|[ 0. 50.]\n"
    elif level in compiled_levels():
        assert result.stdout == f"{level}||4950.0|[0. 0.]|[ 0. 50.]\n"
    else:
        why = f"it was compiled without {level}: run python -m xformer.native.build --all"
        assert result.stdout == f"|{why}||[0. 0.]|[ 0. 50.]\n"


@needs_library
def test_other_layouts_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library is not used if it reads other shapes, pointers or dtypes than NumPy says."""
    types = dict(library._TYPES)
    monkeypatch.setattr(library, "_TYPES", types | {"float32": library._OTHER})
    assert not library._reads_arrays(library.LIB)
    monkeypatch.setattr(library, "_TYPES", types)
    assert library._reads_arrays(library.LIB)

    class Wrong:
        def xf_describe(self, arrays: Any, result: Any) -> bytes | None:
            error = library.LIB.xf_describe(arrays, result)
            result[self.position] += 1
            return error

    for position in range(4):
        Wrong.position = position  # type: ignore[attr-defined]
        assert not library._reads_arrays(Wrong())


@needs_library
def test_operations_have_one_name_each() -> None:
    count = 0
    while library.LIB.xf_name(count):
        count += 1
    assert count == len(library.OPERATIONS) > 0


# --- arrays -----------------------------------------------------------------------------------------------------------


def refused_arrays() -> dict[str, tuple[tuple[Any, ...], str]]:
    x, y = np.zeros(6, np.float32), np.zeros(6, np.float32)
    read_only = np.zeros(6, np.float32)
    read_only.flags.writeable = False
    unaligned = np.zeros(25, np.uint8)[1:].view(np.float32)
    many = np.zeros((1,) * 7, np.float32)
    return {
        "read-only output": ((x, read_only), "an output is read-only"),
        "unaligned input": ((unaligned, y), "an array is not aligned in memory"),
        "unaligned output": ((x, unaligned), "an array is not aligned in memory"),
        "subclass": ((x.view(np.recarray), y), "not an array of NumPy"),
        "matrix": ((x, np.ma.zeros(6, np.float32)), "not an array of NumPy"),
        "number": ((np.float32(1), y), "not an array of NumPy"),
        "list": (([1.0], y), "not an array of NumPy"),
        "seven axes": ((many, many), "an array has too many axes"),
        "fourteen arrays": ((x,) * 14, "too many arrays"),
        "absent": ((x,), "an array is absent"),
        "None": ((x, None), "an array is absent"),
        "big-endian input": ((x.astype(">f4"), y), "the function takes no such dtype"),
        "big-endian output": ((x, y.astype(">f4")), "the output has another dtype"),
        "float16": ((x.astype(np.float16), y), "the function takes no such dtype"),
        "complex": ((x.astype(np.complex64), y), "the function takes no such dtype"),
        "strings": ((np.array(["a"] * 6), y), "the function takes no such dtype"),
        "objects": ((np.array([None] * 6), y), "the function takes no such dtype"),
        "structures": ((np.zeros(6, "f4,f4"), y), "the function takes no such dtype"),
    }


@needs_library
@pytest.mark.parametrize("case", refused_arrays())
def test_refused_arrays(case: str, program: Program) -> None:
    arrays, message = refused_arrays()[case]
    with pytest.raises(ShapeError, match=f"sqrt: {message}"):
        native.call("sqrt", arrays)
    error = program.append("sqrt", arrays)
    assert error is not None
    assert error.decode().startswith(message)
    assert program.close() == 0
    assert program.run(2) is None


@needs_library
def test_read_only_inputs_are_taken() -> None:
    x = np.full(3, 4, np.float32)
    x.flags.writeable = False
    out = np.empty(3, np.float32)
    native.call("sqrt", (x, out))
    assert out.tolist() == [2, 2, 2]


@needs_library
@given(st.lists(st.integers(0, 3), max_size=6), st.integers(0, 2**32 - 1))
def test_describe_reads_shapes_and_strides(shape: list[int], seed: int) -> None:
    rng = np.random.default_rng(seed)
    x = np.zeros(shape, rng.choice(["float32", "int64", "bool", "uint16"]))
    x = x.transpose(rng.permutation(x.ndim))[(*(slice(None, None, int(rng.choice([1, 2, -1]))) for _ in shape), ...)]
    result = (ctypes.c_int64 * 20)()
    assert library.LIB.xf_describe((x,), result) is None
    expected = [1, x.ctypes.data, library._TYPES[x.dtype.name], x.ndim, *x.shape, *x.strides]
    assert result[: len(expected)] == expected


# --- copies in Python -------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 4), max_size=7), st.sampled_from(["float32", "int64", "float16", "bool", ">f4"]))
def test_contiguous(shape: list[int], dtype: str) -> None:
    whole = np.arange(np.prod(shape, dtype=int) * 2).reshape(*shape, 2).astype(dtype)
    for x in (whole[..., 0], whole[..., 0].T, whole[..., 0].copy()):
        for to in (None, "float32"):
            result = native.contiguous(x, to)
            assert result.flags.c_contiguous
            assert result.dtype == (to or dtype)
            np.testing.assert_array_equal(result, x)
            assert (result is x) == (x.flags.c_contiguous and x.dtype == result.dtype)


@given(st.lists(st.integers(0, 4), max_size=7), st.sampled_from(["float32", "int64", "float16", "bool", "complex64"]))
def test_zeros(shape: list[int], dtype: str) -> None:
    result = native.zeros(tuple(shape), dtype)
    assert (result.shape, result.dtype) == (tuple(shape), dtype)
    assert not result.any()


# --- programs ---------------------------------------------------------------------------------------------------------


@needs_library
@pytest.mark.parametrize("size", [3, 300_000])
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_chains(program: Program, threads: int, size: int) -> None:
    """Records that depend on each other run in order: small ones in one group, large ones in a group each."""
    x, one = np.zeros(size, np.float32), np.ones((), np.float32)
    for _ in range(30):
        assert program.append("add", (x, one, x)) is None
    assert program.close() == (1 if size == 3 else 30)
    for run in range(1, 4):
        assert program.run(threads) is None
        np.testing.assert_array_equal(x, np.float32(30 * run))


OPERATORS = {"add": np.add, "subtract": np.subtract, "maximum": np.maximum}


@needs_library
@given(st.integers(0, 2**32 - 1), st.integers(1, 4))
def test_random_programs(seed: int, threads: int) -> None:
    """Records on overlapping parts of one block of memory give what NumPy gives in order, for any number of threads."""
    rng = np.random.default_rng(seed)
    memory = rng.integers(-9, 9, 400_000)
    expected = memory.copy()
    steps = []
    program = Program()
    for _ in range(rng.integers(1, 40)):
        size = int(rng.choice([1, 7, 500, 150_000], p=[0.3, 0.3, 0.3, 0.1]))
        # Operands are the same memory or do not overlap.
        starts = [int(i) * size for i in rng.integers(0, min(400_000 // size, 6), 3)]
        name = str(rng.choice(list(OPERATORS)))
        steps.append((name, [slice(start, start + size) for start in starts]))
        program.append(name, tuple(memory[part] for part in steps[-1][1]))
    program.close()
    for _ in range(2):
        assert program.run(threads) is None
        for name, (a, b, out) in steps:
            OPERATORS[name](expected[a], expected[b], out=expected[out])
        np.testing.assert_array_equal(memory, expected)
    program.free()


@needs_library
def test_records_without_elements(program: Program) -> None:
    empty, x = np.zeros((0, 4), np.float32), np.ones(4, np.float32)
    total = np.full(4, 5, np.float32)
    assert program.append("square", (empty, empty)) is None
    assert program.append("sum", (empty, total), 1) is None
    assert program.append("add", (total, x, total)) is None
    program.close()
    assert program.run(2) is None
    assert total.tolist() == [1] * 4


@needs_library
@pytest.mark.parametrize("threads", [1, 3])
def test_status_of_a_program(program: Program, threads: int) -> None:
    """An index that is out of range is reported once, by the run that read it."""
    x, indices = np.arange(40_000, dtype=np.float32).reshape(20, 2000), np.zeros(100, np.int64)
    out = np.zeros((100, 2000), np.float32)
    program.append("take", (x, indices, out), 0)
    program.close()
    assert program.run(threads) is None
    indices[57] = 20
    assert program.run(threads) == b"an index is out of range"
    assert program.run(threads) == b"an index is out of range"
    indices[57] = -20
    assert program.run(threads) is None
    np.testing.assert_array_equal(out, x[indices])


@needs_library
def test_errors_have_the_name_of_the_operation() -> None:
    x = np.zeros(3, np.float32)
    with pytest.raises(IndexError, match=r"^take: an index is out of range$"):
        native.call("take", (x, np.array([3]), np.zeros(1, np.float32)), 0)
    with pytest.raises(ShapeError, match=r"^add: the shapes do not match$"):
        native.call("add", (x, x[:2], x))
    with pytest.raises(KeyError):
        native.call("no such operation", (x,))


# --- threads and processes --------------------------------------------------------------------------------------------


def in_threads(count: int, function: Any) -> None:
    """Call function(0), function(1), ... in Python threads that start together; raise the first exception."""
    barrier, errors = threading.Barrier(count), []

    def call(number: int) -> None:
        try:
            barrier.wait()
            function(number)
        except BaseException as error:  # noqa: BLE001 - it is raised below
            errors.append(error)

    threads = [threading.Thread(target=call, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def counting_program(x: Any, count: int = 5) -> Program:
    program, one = Program(), np.ones((), np.float32)
    for _ in range(count):
        program.append("add", (x, one, x))
    program.close()
    return program


@needs_library
@for_each("size", [10, 200_000])
def test_python_threads_run_one_program(size: int) -> None:
    x = np.zeros(size, np.float32)
    program = counting_program(x)
    in_threads(4, lambda number: [program.run(2) for _ in range(25)])
    np.testing.assert_array_equal(x, np.float32(500))
    program.free()


@needs_library
def test_python_threads_call_operations() -> None:
    def call(number: int) -> None:
        x, out = np.full(300_000, number, np.float32), np.empty(300_000, np.float32)
        for _ in range(20):
            native.call("square", (x, out))
            np.testing.assert_array_equal(out, np.float32(number**2))

    in_threads(4, call)


_FORK = """
import os, sys, threading
import numpy as np
sys.path.insert(0, sys.argv[1] if len(sys.argv) > 1 else "{tests}")
from test_library import counting_program

x, y = (np.zeros(200_000, np.float32) for _ in range(2))
program, busy = counting_program(x), counting_program(y)
program.run(3)  # starts the helper threads
is_over = False
def work():
    while not is_over:
        busy.run(3)
thread = threading.Thread(target=work)
if {is_busy}:
    thread.start()
for _ in range(20):
    child = os.fork()
    if child == 0:
        for run in range(2, 12):
            program.run(3)
            if not (x == 5 * run).all():
                os._exit(1)
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        sys.exit("the child failed")
program.run(3)
is_over = True
if {is_busy}:
    thread.join()
print(x[0])
"""


@needs_library
@for_each("is_busy", [False, True])
def test_fork(is_busy: bool) -> None:
    """A child runs programs with threads of its own, also if another thread of the parent is running one."""
    result = run_python(
        "import warnings; warnings.simplefilter('ignore')\n"
        + _FORK.format(tests=Path(__file__).parent, is_busy=is_busy)
    )
    assert (result.stdout, result.stderr) == ("10.0\n", "")


# --- threads of the BLAS library --------------------------------------------------------------------------------------


@pytest.fixture
def blas(monkeypatch: Any) -> Any:
    """Set the number of threads of the linear algebra libraries, and that of the native library."""
    controllers = pytest.importorskip("threadpoolctl").ThreadpoolController().select(user_api="blas").lib_controllers
    before = [controller.num_threads for controller in controllers]

    def set_threads(count: int, native_count: int) -> list[Any]:
        for controller in controllers:
            controller.set_num_threads(count)
        monkeypatch.setattr(library, "num_threads", lambda: native_count)
        return controllers

    yield set_threads
    for controller, count in zip(controllers, before, strict=True):
        controller.set_num_threads(count)


@needs_library
@pytest.mark.parametrize("shape", [(1600, 256, 512), (300, 1000, 290), (192, 2000, 192), (256, 1000, 1030)])
@pytest.mark.parametrize("transposed", [(False, False), (True, False), (False, True)])
def test_products_have_the_same_bits_on_any_number_of_threads(blas: Any, shape: Any, transposed: Any) -> None:
    (m, k, n), rng = shape, np.random.default_rng(0)
    x, w = rng.normal(size=(m, k)).astype(np.float32), rng.normal(size=(k, n)).astype(np.float32)
    x = np.ascontiguousarray(x.T).T if transposed[0] else x
    w = np.ascontiguousarray(w.T).T if transposed[1] else w
    results = []
    for counts in ((1, 1), (2, 1), (1, 2), (2, 2), (2, 3)):
        blas(*counts)
        for call in (native.call, lambda *arguments: native.Program([(*arguments, 0, 0, 0, 0, 0.0, 0.0, 0.0, 0.0)])()):
            results.append(np.empty((m, n), np.float32))
            call("matmul", (x, w, results[-1], w[0].copy()))
    np.testing.assert_allclose(results[0], x.astype(float) @ w + w[0], rtol=2e-5, atol=3e-4)
    assert all(np.array_equal(results[0], other) for other in results)


@needs_library
def test_products_in_threads_keep_their_bits_and_restore_the_threads_of_blas(blas: Any) -> None:
    controllers, rng = blas(2, 2), np.random.default_rng(0)
    large, small = (rng.normal(size=(m, k)).astype(np.float32) for m, k in ((1024, 256), (192, 2000)))

    def product(x: Any) -> Any:
        out = np.empty((len(x), len(x)), np.float32)
        native.call("matmul", (x, x.T, out))
        return out

    expected = {len(x): product(x) for x in (large, small)}

    def multiply(x: Any) -> None:
        for _ in range(15):
            assert np.array_equal(product(x), expected[len(x)])

    def limit(count: int) -> None:
        for _ in range(100):
            with blas_threads(count):
                time.sleep(0.0002)

    with ThreadPoolExecutor(5) as executor:
        tasks = [(multiply, large), (multiply, small), (limit, 1), (limit, 1), (multiply, small)]
        for future in [executor.submit(*task) for task in tasks]:
            future.result()
    assert [controller.num_threads for controller in controllers] == [2] * len(controllers)
