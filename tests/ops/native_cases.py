"""Fixtures and comparisons for the tests of kernels that call the native library."""

from __future__ import annotations

import numpy as np
import pytest

from tests.ops.numpy_cases import normal
from xformer import native, ops, vjp

needs_library = pytest.mark.skipif(not native.is_available(), reason="the library was not compiled")
SIZES = [*range(1, 18), 31, 33, 63, 64, 65, 70, 1000]
SPECIAL = [np.nan, np.inf, -np.inf]


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    """Enable the kernels; calculations with special values warn in NumPy, not in the library."""
    monkeypatch.setenv("XFORMER_KERNELS", "auto")
    with np.errstate(all="ignore"):
        yield


def single(*shape, seed=0):
    return normal(*shape, seed=seed).astype("float32")


def assert_selected(operation, *arrays, **options):
    first = ops.explain(operation, *arrays, **options).splitlines()[0]
    assert first == f"{operation} on numpy: native.{operation}"


def assert_precise(function, *arrays, tolerance=1e-6, g=None):
    """Compare value and cotangents with those of float64, relative to the largest element, or to 1 if that is larger.

    NaN and infinities are those of the portable definition in float64.
    """
    results = []
    for dtype in ("float32", "float64"):
        output, pull = vjp(function, *(x.astype(dtype) for x in arrays))
        seed = single(*output.shape, seed=9) if g is None else g
        results.append([output, *pull(seed.astype(output.dtype))])
    for actual, expected in zip(*results, strict=True):
        assert actual.dtype == np.float32
        assert actual.shape == expected.shape
        scale = np.max(np.abs(expected), where=np.isfinite(expected), initial=1.0)
        np.testing.assert_allclose(actual, expected, rtol=0.0, atol=tolerance * scale)
