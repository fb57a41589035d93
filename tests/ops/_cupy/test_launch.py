"""The CUDA sources compile, and their conversions, reductions and random numbers are correct."""

from __future__ import annotations

import importlib
import importlib.util
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest

from tests.ops._cupy import cuda_on_host
from tests.ops._cupy.cuda_cases import DTYPES, normal
from xformer import vjp
from xformer.backends import resolve, to_host
from xformer.errors import BackendError
from xformer.kernels.cupy import launch as cuda_launch
from xformer.kernels.cupy.rows import column_sums
from xformer.ops import cross_entropy, layer_norm

NVCC = shutil.which("nvcc")


@pytest.mark.slow
@pytest.mark.parametrize("file", cuda_on_host.INSTANCES)
def test_sources_compile_for_a_gpu(tmp_path, file):
    if NVCC is None:
        pytest.skip("nvcc is not installed")
    addresses = ", ".join(f"(void*)&{name}" for name in cuda_on_host.instances(file))
    code = tmp_path / f"{file}.cu"
    code.write_text(f"{cuda_launch.source(file)}\nvoid* instances[] = {{{addresses}}};\n", encoding="utf-8")
    options = ["-arch=sm_90", "-cubin", "--Werror", "all-warnings", *cuda_launch.OPTIONS]
    options += ["-Xptxas", "-warn-spills", "-Xptxas", "-Werror"]  # registers do not spill into memory
    done = subprocess.run([NVCC, *options, "-o", str(code.with_suffix(".cubin")), str(code)], capture_output=True)
    assert not done.returncode, done.stderr.decode()
    names = code.with_suffix(".cubin").read_bytes()
    for function in cuda_on_host.INSTANCES[file]:
        assert f"{len(function)}{function}I".encode() in names  # as C++ mangles a template


@pytest.mark.parametrize("file", cuda_on_host.INSTANCES)
def test_sources_compile_as_cupy_compiles_them(file):
    """NVRTC needs no GPU, and has no headers."""
    if importlib.util.find_spec("cupy") is None:
        pytest.skip("cupy is not installed")
    nvrtc = importlib.import_module("cupy_backends.cuda.libs.nvrtc")
    try:
        nvrtc.getVersion()
    except (RuntimeError, ImportError, OSError) as reason:
        pytest.skip(f"no NVRTC: {reason}")
    names = list(cuda_on_host.instances(file))
    program = nvrtc.createProgram(cuda_launch.source(file), f"{file}.cu", (), ())
    for name in names:
        nvrtc.addNameExpression(program, name)
    options = [*cuda_launch.OPTIONS, "-arch=sm_90", "-ftz=true", "--device-as-default-execution-space"]
    try:
        nvrtc.compileProgram(program, options)
    except nvrtc.NVRTCError:
        pytest.fail(nvrtc.getProgramLog(program))
    assert len({nvrtc.getLoweredName(program, name) for name in names}) == len(names)


def test_all_kernels_of_the_sources_are_tested():
    for file, functions in cuda_on_host.INSTANCES.items():
        text = cuda_launch.source(file)
        assert set(re.findall(r"__global__ void (?:\w+\(.*?\)\s+)?(\w+)\(", text)) == set(functions)
        assert "#include" not in text
        assert "atomic" not in text
    files = {path.stem for path in cuda_launch._SOURCES.glob("*.cu")}
    assert files == {"common", *cuda_on_host.INSTANCES}


@pytest.mark.skipif(importlib.util.find_spec("cupy") is not None, reason="cupy is installed")
def test_a_launch_without_cupy_reports_the_install_command():
    with pytest.raises(
        BackendError, match=r"^backend 'cupy' is not installed; run: pip install \"array-transformers\[cuda\]"
    ):
        cuda_launch.launch("elementwise.add", ("float32",), 1, 32)


def test_importing_the_kernels_imports_only_numpy():
    program = "import sys, xformer.kernels.cupy; print(sorted({'cupy', 'torch', 'jax', 'numba'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# --- numbers of 16 bits ------------------------------------------------------------------


def unrounded():
    """Values on, near and halfway between those of 16 bits, of all sizes."""
    bits = np.arange(2**16, dtype=np.uint32) << 16
    halfway = np.concatenate([bits, bits + 0x8000, bits + 0x7FFF, bits + 0x8001]).view(np.float32)
    halves = np.arange(2**16, dtype=np.uint16).view(np.float16).astype(np.float32)
    with np.errstate(all="ignore"):
        between = (halves[:-1] + halves[1:]) / 2
        return np.concatenate([halfway, between, np.nextafter(between, np.float32(np.inf)), np.nextafter(halves, 0)])


def flushed(cuda, host):
    """In float64; CuPy compiles so that a GPU takes numbers too small for float32's exponent as zero."""
    with np.errstate(invalid="ignore"):  # what is not a number stays that
        host = host.astype(np.float64)
    return host if cuda.launcher else np.where(np.abs(host) < 2.0**-126, 0.0, host)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_conversions_of_16_bits_equal_those_of_numpy(cuda, dtype):
    """A sum over one row changes nothing but the type."""
    narrow = resolve("numpy").dtype_named(dtype)
    values, every = flushed(cuda, unrounded()).astype(np.float32), np.arange(2**16, dtype=np.uint16).view(narrow)
    with np.errstate(all="ignore"):
        rounded = values.astype(narrow)
    got = column_sums(cuda.array(values[None]), narrow, 1)
    np.testing.assert_array_equal(flushed(cuda, to_host(got)), flushed(cuda, rounded))
    got = column_sums(cuda.xp.asarray(every[None]), cuda.xp.float32, 1)
    np.testing.assert_array_equal(to_host(got), flushed(cuda, every))


# --- threads ------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_order_of_threads_does_not_change_the_bits(launcher, cuda_host, dtype):
    x, weight, bias = (cuda_host.array(normal(*shape), dtype) for shape in ((40, 600), (600,), (600,)))
    labels = np.arange(40)

    def all_of_it():
        y, pull = vjp(layer_norm, x, weight, bias)
        loss, pull_loss = vjp(lambda y: cross_entropy(y, labels, label_smoothing=0.1), y)
        return [y, loss, *pull(pull_loss(np.ones_like(loss))[0])]

    first = all_of_it()
    launcher.backwards = True
    try:
        second = all_of_it()
    finally:
        launcher.backwards = False
    for one, other in zip(first, second, strict=True):
        np.testing.assert_array_equal(one.view(np.uint8), other.view(np.uint8))


def test_a_barrier_that_some_threads_miss_is_reported(tmp_path, monkeypatch):
    if cuda_on_host.COMPILER is None:
        pytest.skip("g++ is not installed")
    code = "template <typename T> __global__ void stuck(T* x) { if (threadIdx.x) { __syncthreads(); *x = 1; } }"
    monkeypatch.setitem(cuda_on_host.INSTANCES, "wrong", {"stuck": [("float",)]})
    monkeypatch.setattr(cuda_launch, "source", lambda name: code)
    with pytest.raises(AssertionError, match="stuck<float>: not all threads reach a barrier"):
        cuda_on_host.Launcher(tmp_path).launch("wrong.stuck", ("float",), 1, 64, np.zeros(1, np.float32))
