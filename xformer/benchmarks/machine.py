"""Description of the machine that measurements belong to, and the speed of its matrix product."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import xformer
from xformer import native
from xformer.benchmarks.computation import Backend, Computation
from xformer.benchmarks.interleaved import Spec, Workload, interleaved_benchmark
from xformer.threads import num_threads

_PACKAGES = ("numpy", "torch", "jax", "cupy", "nvidia-cudnn-cu13", "ctranslate2", "transformers")
_GEMM_SIZE, _GEMM_ROUNDS = 2048, 5


def describe_machine(threads: int | None = None, libraries: Sequence[str] = ()) -> dict[str, Any]:
    """Describe the machine as JSON data, with the versions of some packages and of array libraries.

    `native` is the instruction set of the native library, or why it is not used; `load` is the average of the last
    minute, before any measurement.
    """
    names = dict.fromkeys([*_PACKAGES, *(library.split(".")[0] for library in libraries)])
    versions = {name: version for name in names if (version := _version(name))}
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": threads or num_threads(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "xformer": xformer.__version__,
        "versions": versions,
        "native": native.level() or f"not used: {native.WHY_NOT}",
        "blas": _blas(),
        "gpu": _gpu(),
        "load": round(os.getloadavg()[0], 1) if hasattr(os, "getloadavg") else None,
    }


def gemm(settings: dict[str, Any]) -> Computation:
    """Build the product of two square matrices, an upper bound for the speed of any other arithmetic."""
    backend, size = Backend.from_settings(settings), settings["size"]
    rng = np.random.default_rng(0)
    a, b = (backend.array(rng.standard_normal((size, size), dtype="float32")) for _ in range(2))
    return backend.computation(lambda a, b: a @ b, a, b)


def gemm_flops_per_second(backend: str, threads: int | None = None, dtype: str = "float32") -> float:
    """Return the highest number of operations per second that a library reaches in a matrix product."""
    size = _GEMM_SIZE if backend != "cupy" else 4 * _GEMM_SIZE  # smaller products do not saturate a GPU
    if backend == "numpy" and dtype == "float16":
        dtype = "float32"  # NumPy has no BLAS for float16; its loop would take minutes
    workload = Workload("matrix product", {"size": size, "dtype": dtype}, (size,), 2 * size**3)
    spec = Spec(backend, "xformer.benchmarks.machine:gemm", {"backend": backend})
    with interleaved_benchmark(workload, [spec], threads) as benchmark:
        for _ in range(_GEMM_ROUNDS):
            benchmark.run_round()
        return workload.flops / min(benchmark.implementations[0].seconds)


def _version(package: str) -> str | None:
    for name in (package, "cupy-cuda13x", "cupy-cuda12x") if package == "cupy" else (package,):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return None


def _blas() -> str:
    """Return NumPy's BLAS; if threadpoolctl is installed, with the architecture of its kernels."""
    if importlib.util.find_spec("threadpoolctl") is not None:
        pools = importlib.import_module("threadpoolctl").threadpool_info()
        names = {
            f"{pool['internal_api']} {pool['version']} ({pool.get('architecture')})"
            for pool in pools
            if pool["user_api"] == "blas"
        }
        if names:
            return ", ".join(sorted(names))
    build = np.show_config(mode="dicts").get("Build Dependencies", {}).get("blas", {})
    return f"{build.get('name', 'unknown')} {build.get('version', '')}".strip()


def _gpu() -> str | None:
    """Return the names of the GPUs and the version of the driver, as reported by nvidia-smi."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    query = [tool, "--query-gpu=name,driver_version", "--format=csv,noheader"]
    output = subprocess.run(query, capture_output=True, encoding="utf-8", check=False)
    return "; ".join(output.stdout.split("\n")).strip("; ") or None


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
