"""Shared fixtures: `xp`, which runs a test on every array library, and `assert_close`.

`xp` is the namespace that `resolve(name)` returns for each installed library. array_api_strict runs without boolean
indexing and data-dependent shapes, so a test that passes needs neither. Compiling for JAX dominates the time of tests
on small arrays, so outside of the core directories (see `JAX_BY_DEFAULT`) tests on JAX are marked slow.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import settings

from xformer.backends import array_namespace, dtype_name, resolve, to_host
from xformer.environment import clear_cache
from xformer.native import has_fused_products, use_reproducible_algorithms

# Largest difference explained by rounding, relative to the largest expected value (or to 1 if that is larger).
TOLERANCES = {"float16": 4e-3, "bfloat16": 3e-2, "float32": 2e-5, "float64": 1e-10}

# Files of few and long tests run first, so that no worker of pytest-xdist is left with one of them at the end.
FIRST = {
    f"test_{name}.py"
    for name in ("decoding", "docs", "explorer", "extensions", "forward", "launch", "language_model", "mpi", "parts",
                 "random_writes", "readme", "reproducible", "torch_compile", "tutorial", "verify", "vmap")
}  # fmt: skip

# Directories whose tests run on JAX by default; elsewhere they are slow tests.
JAX_BY_DEFAULT = ("backends", "ops", "tracing")

settings.register_profile("xformer", deadline=None, max_examples=50)  # no test depends on the speed of a machine
settings.load_profile("xformer")

signal.signal(signal.SIGINT, signal.default_int_handler)  # tests send SIGINT, which background jobs of a shell ignore

LIBRARIES = [
    pytest.param("numpy", id="numpy"),
    pytest.param("torch", id="torch"),
    pytest.param("jax", id="jax"),
    pytest.param("array_api_strict", id="strict", marks=pytest.mark.strict),
    pytest.param("cupy", id="cupy", marks=pytest.mark.gpu),
]


def library_or_skip(name: str) -> Any:
    """Return the Array API namespace of a library; skip the test if the library cannot be used."""
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed")
    if name == "cupy" and not importlib.import_module("cupy").cuda.is_available():
        pytest.skip("cupy finds no GPU")
    if name == "jax":
        # Without this, JAX turns every float64 into float32. It cannot be undone within a process, so all tests run
        # with it; JAX without it is tested in a separate process.
        importlib.import_module("jax").config.update("jax_enable_x64", True)
        _share_context_of_jax()
    return resolve(name)


@functools.cache
def _share_context_of_jax() -> None:
    """Let JAX compile in one context: to make one for each operation takes a fifth of the time of its tests."""
    with contextlib.suppress(ImportError, AttributeError):  # in other versions
        mlir = importlib.import_module("jax._src.interpreters.mlir")
        mlir.make_ir_context = functools.cache(mlir.make_ir_context)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests on JAX as slow, except those in the directories of `JAX_BY_DEFAULT`; sort by `FIRST`."""
    items.sort(key=lambda item: item.path.name not in FIRST)
    core = tuple(Path(__file__).parent / name for name in JAX_BY_DEFAULT)
    for item in items:
        parameters = item.callspec.params.values() if hasattr(item, "callspec") else ()
        runs_on_jax = any(isinstance(value, str) and value == "jax" for value in parameters)
        if runs_on_jax and not any(item.path.is_relative_to(folder) for folder in core):
            item.add_marker(pytest.mark.slow)


def _clear_cache_after(change: Any) -> Any:
    def changed(*args: Any, **keywords: Any) -> None:
        change(*args, **keywords)
        clear_cache()

    return changed


@pytest.fixture
def monkeypatch(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Extend pytest's fixture: changes of the environment also reach settings that are read once and cached."""
    for name in ("setenv", "delenv"):
        monkeypatch.setattr(monkeypatch, name, _clear_cache_after(getattr(monkeypatch, name)))
    yield monkeypatch
    monkeypatch.undo()
    clear_cache()


@pytest.fixture
def mode(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[bool], None]]:
    """Return the function that switches reproducible mode, which is off before and after the test."""
    monkeypatch.setenv("XFORMER_REPRODUCIBLE", "0")
    yield use_reproducible_algorithms
    use_reproducible_algorithms(False)


@pytest.fixture
def reproducible(mode: Callable[[bool], None]) -> None:
    """Switch reproducible mode on for the test."""
    if not has_fused_products():
        pytest.skip(_NEEDS_FUSED_PRODUCTS)
    mode(True)


@pytest.fixture(params=LIBRARIES)
def xp(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Run the test with the namespace of each array library."""
    namespace = library_or_skip(request.param)
    if request.param != "array_api_strict":
        yield namespace
        return
    with namespace.ArrayAPIStrictFlags(api_version="2024.12", boolean_indexing=False, data_dependent_shapes=False):
        yield namespace


_NEEDS_FUSED_PRODUCTS = "needs the library for AVX2, AVX-512 or NEON"
needs_fused_products = pytest.mark.skipif(not has_fused_products(), reason=_NEEDS_FUSED_PRODUCTS)


def assert_close(
    actual: Any, expected: Any, *, xp: Any = None, dtype: str | None = None, tolerance: float | None = None
) -> None:
    """Check values, shape, dtype and library of an array.

    Args:
        actual: The array to check.
        expected: An array of the library that `actual` must belong to; with `xp`, anything that NumPy can convert.
        xp: The namespace that `actual` must belong to, if it is not that of `expected`.
        dtype: The name of the expected dtype, if it is not that of `expected`.
        tolerance: Replaces the tolerance that `TOLERANCES` has for the dtype.
    """
    namespace = array_namespace(expected) if xp is None else resolve(xp)
    assert array_namespace(actual).name == namespace.name
    host = to_host(expected) if hasattr(expected, "dtype") else np.asarray(expected)
    expected_dtype = dtype or dtype_name(expected.dtype if hasattr(expected, "dtype") else host.dtype)
    assert dtype_name(actual.dtype) == expected_dtype
    assert tuple(actual.shape) == host.shape
    if tolerance is None:
        tolerance = TOLERANCES.get(expected_dtype, 0.0)
    largest = np.max(np.abs(np.where(np.isfinite(host), host, 0)), initial=1.0)
    np.testing.assert_allclose(to_host(actual), host, rtol=0.0, atol=tolerance * largest)
