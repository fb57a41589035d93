"""The native library as a whole: instruction sets, environment variables, errors, and records of calls."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.reference import native_levels
from xformer import native
from xformer.errors import ShapeError
from xformer.native import build

ROOT = Path(__file__).parents[2]
NUMBERS = (0, 0, 0, 0, 0.0, 0.0, 0.0, 0.0)  # relu has none
SHOW = "from xformer import native; print(native.level(), native.WHY_NOT, sep='|')"

needs_library = pytest.mark.skipif(not native.is_available(), reason="needs the native library")


def run(program, **variables):
    """Run a program in another process; return its output, or its last line of errors."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else done.stderr.strip().splitlines()[-1]


def inputs(size):
    x = np.random.default_rng(0).standard_normal(size, dtype="float32")
    x[::7] = np.nan
    return x


@needs_library
@pytest.mark.parametrize("size", [1, 15, 16, 17, 1000, 200_000])
def test_an_operation_computes_and_stays_in_its_array(size):
    x, memory = inputs(size), np.full(size + 32, 7.0, np.float32)
    native.call("relu", (x, memory[16:-16]))
    np.testing.assert_array_equal(memory[16:-16], np.maximum(x, np.float32(0)))
    assert np.all(memory[:16] == 7.0)
    assert np.all(memory[size + 16 :] == 7.0)


@needs_library
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda x: (x, x.astype(np.float64)), "of float32"),
        (lambda x: (x, np.empty(3, np.float32)), "with sizes that match"),
        (lambda x: (x, np.empty(16, np.float32)[::2]), "contiguous"),
        (lambda x: (x, [1.0] * 8), "not an array of NumPy"),
        (lambda x: (x, np.broadcast_to(np.float32(0), 8)), "read-only"),
        (lambda x: (x, np.frombuffer(bytearray(33), np.uint8)[1:].view(np.float32)), "not aligned"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(make, message):
    arrays = make(np.ones(8, np.float32))
    with pytest.raises(ShapeError, match=f"relu: .*{message}"):
        native.call("relu", arrays)
    with pytest.raises(ShapeError, match=message):
        native.Program([("relu", arrays, *NUMBERS)])


@needs_library
@pytest.mark.parametrize("size", [100, 300_000])
def test_a_program_repeats_calls_in_their_order(size):
    x, first, second = np.empty(size, np.float32), np.empty(size, np.float32), np.empty(size, np.float32)
    program = native.Program([("relu", (x, first), *NUMBERS), ("relu", (first, second), *NUMBERS)])
    for seed in range(3):
        x[...] = np.random.default_rng(seed).standard_normal(size)
        program()
        np.testing.assert_array_equal(second, np.maximum(x, 0))


@needs_library
def test_calls_of_this_thread_are_recorded():
    x, y = inputs(20), np.empty(20, np.float32)
    calls = []
    with native.record(lambda *call: calls.append(call)):
        native.call("relu", (x, y))
        with native.record(None):
            native.call("relu", (x, y))
    native.call("relu", (x, y))
    ((name, arrays, numbers, outputs),) = calls
    assert (name, numbers) == ("relu", (0,) * 8)
    assert [id(array) for array in (*arrays, *outputs)] == [id(x), id(y), id(y)]


@needs_library
def test_levels_have_the_same_bits():
    program = (
        "import hashlib, numpy as np; from xformer import native\n"
        "x = np.random.default_rng(0).standard_normal(1001, dtype='float32'); y = np.empty_like(x)\n"
        "native.call('relu', (x, y)); print(native.level(), hashlib.md5(y).hexdigest())"
    )
    found = dict(run(program, XFORMER_NATIVE=level).split(" ", 1) for level in native_levels())
    assert list(found) == native_levels()
    assert len(set(found.values())) == 1


def test_the_library_can_be_switched_off():
    assert run(SHOW, XFORMER_NATIVE="off") == "|XFORMER_NATIVE=off"


def test_a_library_that_is_missing_or_broken_is_not_used(tmp_path):
    path = tmp_path / "library.so"
    assert run(SHOW, XFORMER_NATIVE_LIBRARY=str(path)).startswith("|it was not compiled: with a C++ compiler")
    path.write_bytes(b"no library")
    assert run(SHOW, XFORMER_NATIVE_LIBRARY=str(path)).startswith("|")


def test_an_unknown_level_is_refused():
    """With the first array, not while xformer is imported: the command line then prints one line."""
    expected = "XFORMER_NATIVE is 'avx3'; expected 'auto', 'off', 'baseline', 'avx2', 'avx512'"
    assert run(SHOW, XFORMER_NATIVE="avx3") == f"|{expected}"
    program = "import numpy, xformer; xformer.ops.relu(numpy.ones(1))"
    assert run(program, XFORMER_NATIVE="avx3").endswith(f"ConfigError: {expected}")


def test_a_library_is_current_until_its_sources_or_flags_change(tmp_path, monkeypatch):
    if build.compiler() is None:
        pytest.skip("needs a C++ compiler")
    monkeypatch.delenv("LD_PRELOAD", raising=False)  # a sanitizer, which the compiler does not need
    source, library = tmp_path / "src" / "runtime.cpp", tmp_path / "libxformer.so"
    source.parent.mkdir()
    source.write_text('extern "C" __attribute__((visibility("default"))) const char* xf_key() { return KEY; }')
    monkeypatch.setattr(build, "FOLDER", tmp_path)
    monkeypatch.setattr(build, "LIBRARY", library)
    assert not build.is_current()
    build.build(library)
    assert build.is_current()
    os.utime(source)  # as in a new checkout of the same sources
    assert build.is_current()
    monkeypatch.setenv("XFORMER_NATIVE_FLAGS", "-O1")
    assert not build.is_current()
    monkeypatch.delenv("XFORMER_NATIVE_FLAGS")
    source.write_text(source.read_text() + "\n")
    assert not build.is_current()


@pytest.mark.skipif(len(native_levels()) < 2, reason="needs a library with several instruction sets")
def test_the_best_level_is_that_which_the_library_chooses():
    assert run(SHOW, XFORMER_NATIVE="auto") == f"{next(iter(build._best_level()))}|"


@pytest.mark.skipif(platform.machine() != "x86_64", reason="other processors have one instruction set")
def test_a_library_for_a_newer_processor_says_so(tmp_path, monkeypatch):
    if build.compiler() is None:
        pytest.skip("needs a C++ compiler")
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    monkeypatch.setenv("XFORMER_NATIVE_FLAGS", "-D__builtin_cpu_supports(name)=0")
    (tmp_path / "src").mkdir()
    for name in ("runtime.cpp", "record.h"):
        shutil.copy(build.FOLDER / "src" / name, tmp_path / "src")
    families = "extern const Family* const families[]; const Family* const families[] = {nullptr};"
    (tmp_path / "src" / "linear.cpp").write_text(f'#include "record.h"\nnamespace ISA {{ {families} }}')
    monkeypatch.setattr(build, "FOLDER", tmp_path)
    monkeypatch.setattr(build, "_best_level", lambda: {"avx2": ["-march=x86-64-v3"]})
    library = str(tmp_path / "libxformer.so")
    build.build(Path(library))
    reasons = {
        "auto": "it was compiled for a newer processor: run python -m xformer.native.build",
        "avx2": "this processor has no avx2",
        "baseline": "it was compiled without baseline: run python -m xformer.native.build --all",
    }
    for level, reason in reasons.items():
        assert run(SHOW, XFORMER_NATIVE_LIBRARY=library, XFORMER_NATIVE=level) == f"|{reason}"
