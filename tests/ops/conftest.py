"""Fixtures of the tests of kernels."""

from __future__ import annotations

import ctypes
import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.conftest import assert_close, library_or_skip
from tests.ops._cupy import cuda_on_host, fake_cublas
from tests.ops.replace_kernels import replace_kernels
from xformer import ops, vjp
from xformer.backends import dtype_name, from_host, is_floating, resolve
from xformer.kernels.cupy import cublas, cublaslt, kernels, launch
from xformer.kernels.cupy import launch as cuda_launch


@pytest.fixture
def no_native(monkeypatch):
    """Disable the kernels of the native library."""
    monkeypatch.setenv("XFORMER_KERNELS", "no-native")


# --- CUDA kernels, on a GPU or on the CPU ----------------------------------------------------------------------------


class Cuda:
    """Runs the CuPy kernels of a test on CuPy arrays or, with a `launcher`, on NumPy arrays."""

    def __init__(self, xp: Any, launcher: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.xp, self.launcher, self._monkeypatch = xp, launcher, monkeypatch

    def array(self, host: Any, dtype: str | None = None) -> Any:
        """Return an array of the library; floating arrays in `dtype`, if given."""
        host = np.asarray(host)
        return from_host(self.xp, host, dtype=dtype if host.dtype.kind == "f" else None)

    def served(self, operation: str, *arrays: Any, **static: Any) -> bool:
        """Return whether our kernel is selected for a call."""
        lines = ops.explain(operation, *arrays, **static).splitlines()
        return any(line.endswith(f": cupy.{operation}") for line in lines)

    def agree(self, function: Any, *hosts: Any, dtype: Any, layout: Any = None, tolerance: float | None = None) -> None:
        """Compare output and cotangents of a function with those of the portable definitions in float64.

        Masks, ids and labels are constants. dtype: of all floating arrays, or a tuple with one dtype per array.
        layout: a function that changes the memory layout of the first array.
        """
        hosts = [np.asarray(host) for host in hosts]
        dtypes = (dtype,) * len(hosts) if isinstance(dtype, str) else dtype
        rounded = [_rounded(host, each) for host, each in zip(hosts, dtypes, strict=True)]
        arrays = [from_host(self.xp, host) for host in rounded]
        arrays[0] = arrays[0] if layout is None else layout(arrays[0])
        untraced = function(*arrays)
        output, pull = _vjp(function, arrays)
        of_output = dtype_name(output.dtype)
        g = _rounded(np.random.default_rng(9).normal(size=output.shape), of_output)
        cotangents = pull(from_host(self.xp, g))

        with self._monkeypatch.context() as context:
            replace_kernels(context, "numpy", {})
            expected, expected_pull = _vjp(function, [_rounded(host, "float64") for host in rounded])
            reference = expected_pull(g.astype(np.float64))
        for actual, correct in [(untraced, expected), (output, expected)]:
            assert_close(actual, correct, xp=self.xp, dtype=of_output, tolerance=tolerance)
        of_inputs = [each for host, each in zip(rounded, dtypes, strict=True) if is_floating(host.dtype)]
        for actual, correct, each in zip(cotangents, reference, of_inputs, strict=True):
            assert_close(actual, correct, xp=self.xp, dtype=each, tolerance=tolerance)


def _rounded(host: Any, dtype: str) -> Any:
    """Cast a floating host array; masks and ids stay as they are."""
    return host.astype(resolve("numpy").dtype_named(dtype)) if is_floating(host.dtype) else host


def _vjp(function: Any, arrays: Any) -> Any:
    """Return the output and the VJP with respect to the floating arrays."""
    places = [index for index, array in enumerate(arrays) if is_floating(array.dtype)]

    def of_floats(*floats: Any) -> Any:
        own = dict(zip(places, floats, strict=True))
        return function(*(own.get(index, array) for index, array in enumerate(arrays)))

    return vjp(of_floats, *(arrays[index] for index in places))


@pytest.fixture(scope="session")
def launcher(tmp_path_factory):
    """Return a launcher that runs the CUDA sources on the CPU."""
    if cuda_on_host.COMPILER is None:
        pytest.skip("g++ is not installed")
    base = tmp_path_factory.getbasetemp()  # of each process of pytest-xdist in a folder of all
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "cuda_on_host"
    folder.mkdir(exist_ok=True)
    return cuda_on_host.Launcher(folder)


@pytest.fixture(scope="session")
def fake_cublaslt(tmp_path_factory):
    """Build a cuBLASLt that multiplies on the CPU."""
    if cuda_on_host.COMPILER is None:
        pytest.skip("g++ is not installed")
    built = tmp_path_factory.mktemp("cublaslt") / "libcublasLt.so"
    code = Path(__file__).parent / "_cupy" / "fake_cublaslt.cpp"
    options = ["-std=c++17", "-O1", "-fPIC", "-shared", "-w", "-o", str(built)]
    subprocess.run([cuda_on_host.COMPILER, *options, str(code)], check=True)
    return cublaslt.declare(ctypes.CDLL(str(built)))


def use_fake_cublas(fake_cublaslt: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace cuBLAS and cuBLASLt by stand-ins, with empty caches."""
    monkeypatch.setattr(cublaslt, "library", lambda: fake_cublaslt)
    monkeypatch.setattr(cublaslt, "_plans", launch.Plans(512))
    monkeypatch.setattr(cublaslt, "_failures", launch.Failures())
    monkeypatch.setattr(launch, "current", lambda: (0, 54321))
    monkeypatch.setattr(launch, "workspace", lambda size: np.empty(size, np.uint8))
    monkeypatch.setattr(cublas, "binding_and_handle", lambda: (fake_cublas.Binding(), fake_cublas.HANDLE))
    monkeypatch.setattr(cublas, "pointer", lambda array: array.ctypes.data)


def on_the_host(launcher: Any, fake_cublaslt: Any, monkeypatch: pytest.MonkeyPatch) -> Cuda:
    """Register the CuPy kernels for NumPy arrays."""
    others = "cupy.attention", "cupy.attention_in_tiles"  # which have their own tests
    own = [each for each in kernels.KERNELS if each.name not in others]
    replace_kernels(monkeypatch, "numpy", {each.operation: [each] for each in own})
    monkeypatch.setattr(cuda_launch, "launch", launcher.launch)
    monkeypatch.setattr(cuda_launch, "is_current_device", lambda array: True)
    use_fake_cublas(fake_cublaslt, monkeypatch)
    launcher.launched.clear()
    return Cuda(resolve("numpy"), launcher, monkeypatch)


@pytest.fixture
def cuda_host(launcher, fake_cublaslt, monkeypatch):
    """Run the CuPy kernels on NumPy arrays, with sources compiled for the CPU."""
    monkeypatch.setenv("XFORMER_KERNELS", "auto")
    return on_the_host(launcher, fake_cublaslt, monkeypatch)


@pytest.fixture(params=["host", pytest.param("gpu", marks=pytest.mark.gpu)])
def cuda(request, monkeypatch):
    """Run the CuPy kernels on NumPy arrays and, marked gpu, on CuPy arrays."""
    monkeypatch.setenv("XFORMER_KERNELS", "auto")
    if request.param == "host":
        return request.getfixturevalue("cuda_host")
    return Cuda(library_or_skip("cupy"), None, monkeypatch)
