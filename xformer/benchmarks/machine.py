"""What figures belong to: processor, cores, BLAS, versions, and how fast a matrix product is."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
from pathlib import Path
from typing import Any

from xformer.benchmarks.interleaved import Case, Entry, racing
from xformer.benchmarks.workload import Library, Work
from xformer.threads import num_threads

_PACKAGES = ("numpy", "torch", "jax", "cupy", "nvidia-cudnn-cu13", "numba", "ctranslate2", "transformers")
_GEMM_SIZE, _GEMM_TURNS = 2048, 5


def describe_machine(threads: int | None = None) -> dict[str, Any]:
    """A JSON-ready description; load is that of the last minute, before anything was measured."""
    versions = {name: version for name in _PACKAGES if (version := _version(name))}
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": threads or num_threads(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "xformer": _version("xformer"),
        "versions": versions,
        "blas": _blas(),
        "gpu": _gpu(),
        "load": round(os.getloadavg()[0], 1) if hasattr(os, "getloadavg") else None,
    }


def gemm(settings: dict[str, Any]) -> Work:
    """A product of two square matrices in the dtype of the work: what no other arithmetic on this machine can pass."""
    library, size = Library.of(settings), settings["size"]
    rng = importlib.import_module("numpy").random.default_rng(0)
    a, b = (library.array(rng.standard_normal((size, size), dtype="float32")) for _ in range(2))
    return library.work(lambda a, b: a @ b, a, b)


def gemm_flops_per_second(backend: str, threads: int | None = None, dtype: str = "float32") -> float:
    """The most operations a second that matrix products of a library reach here, in several turns."""
    size = _GEMM_SIZE if backend != "cupy" else 4 * _GEMM_SIZE  # smaller ones do not fill a GPU
    if backend == "numpy" and dtype == "float16":
        dtype = "float32"  # of float16, NumPy multiplies number by number, which would take minutes
    case = Case("matrix product", {"size": size, "dtype": dtype}, (size,), 2 * size**3)
    with racing(case, [Entry(backend, "xformer.benchmarks.machine:gemm", {"backend": backend})], threads) as running:
        for _ in range(_GEMM_TURNS):
            running.turn()
        return case.flops / min(running.contenders[0].seconds)


def _version(package: str) -> str | None:
    for name in (package, "cupy-cuda13x", "cupy-cuda12x") if package == "cupy" else (package,):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return None


def _blas() -> str:
    """NumPy's linear algebra library; with threadpoolctl installed, also the kernels it chose."""
    numpy = importlib.import_module("numpy")
    if importlib.util.find_spec("threadpoolctl") is not None:
        pools = importlib.import_module("threadpoolctl").threadpool_info()
        found = {
            f"{pool['internal_api']} {pool['version']} ({pool.get('architecture')})"
            for pool in pools
            if pool["user_api"] == "blas"
        }
        if found:
            return ", ".join(sorted(found))
    built = numpy.show_config(mode="dicts").get("Build Dependencies", {}).get("blas", {})
    return f"{built.get('name', 'unknown')} {built.get('version', '')}".strip()


def _gpu() -> str | None:
    """The names of the GPUs and the driver's version, as the driver's own tool tells them."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    query = [tool, "--query-gpu=name,driver_version", "--format=csv,noheader"]
    told = subprocess.run(query, capture_output=True, text=True, check=False)
    return "; ".join(told.stdout.split("\n")).strip("; ") or None


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
