"""What tests of every room share: the `xp` fixture, and a comparison that looks at more than values.

`xp` runs a test on every array library that is installed here, as the namespace that `resolve(name)` gives. On
array_api_strict, boolean indexing and data-dependent shapes are off, so a test that passes needs neither.
"""

from __future__ import annotations

import importlib
import importlib.util
import signal
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from xformer.backends import array_namespace, backend_name, dtype_name, resolve, to_host
from xformer.environment import env_value

# The largest difference that rounding explains, relative to the largest expected value (or to 1, if that is larger).
TOLERANCES = {"float16": 4e-3, "bfloat16": 3e-2, "float32": 2e-5, "float64": 1e-10}

signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell's background jobs ignore, and tests send

LIBRARIES = [
    pytest.param("numpy", id="numpy"),
    pytest.param("torch", id="torch"),
    pytest.param("jax", id="jax"),
    pytest.param("array_api_strict", id="strict", marks=pytest.mark.strict),
    pytest.param("cupy", id="cupy", marks=pytest.mark.gpu),
]


def library_or_skip(name: str) -> Any:
    """The standard namespace of a library; skips the test, with the reason, where it cannot be used."""
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed")
    if name == "cupy" and not importlib.import_module("cupy").cuda.is_available():
        pytest.skip("cupy finds no GPU")
    if name == "jax":
        # Without this, jax turns every float64 into float32. It cannot be undone within a process, so all tests
        # run with it; what users without it see is tested in a process of its own.
        importlib.import_module("jax").config.update("jax_enable_x64", True)
    return resolve(name)


def _then_forget(change: Any) -> Any:
    def changed(*args: Any, **keywords: Any) -> None:
        change(*args, **keywords)
        env_value.cache_clear()

    return changed


@pytest.fixture
def monkeypatch(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """pytest's own, but what it changes in the environment is seen by code that reads a setting only once."""
    for name in ("setenv", "delenv"):
        monkeypatch.setattr(monkeypatch, name, _then_forget(getattr(monkeypatch, name)))
    yield monkeypatch
    monkeypatch.undo()
    env_value.cache_clear()


@pytest.fixture(params=LIBRARIES)
def xp(request: pytest.FixtureRequest) -> Iterator[Any]:
    """An array library's namespace, one after the other."""
    namespace = library_or_skip(request.param)
    if request.param != "array_api_strict":
        yield namespace
        return
    with namespace.ArrayAPIStrictFlags(api_version="2024.12", boolean_indexing=False, data_dependent_shapes=False):
        yield namespace


def assert_close(
    actual: Any, expected: Any, *, xp: Any = None, dtype: str | None = None, tolerance: float | None = None
) -> None:
    """Check values, shape, dtype and library of an array.

    expected: an array of the library that `actual` must be of; or, with `xp` saying which that is, anything that
    NumPy can hold. dtype: the name of the expected dtype, if not that of `expected`. tolerance: in place of the one
    that `TOLERANCES` has for the dtype.
    """
    wanted = array_namespace(expected) if xp is None else xp
    assert backend_name(array_namespace(actual)) == backend_name(wanted)
    host = to_host(expected) if hasattr(expected, "dtype") else np.asarray(expected)
    wanted_dtype = dtype or dtype_name(expected.dtype if hasattr(expected, "dtype") else host.dtype)
    assert dtype_name(actual.dtype) == wanted_dtype
    assert tuple(actual.shape) == host.shape
    if tolerance is None:
        tolerance = TOLERANCES.get(wanted_dtype, 0.0)
    largest = np.max(np.abs(np.where(np.isfinite(host), host, 0)), initial=1.0)
    np.testing.assert_allclose(to_host(actual), host, rtol=0.0, atol=tolerance * largest)
