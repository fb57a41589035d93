"""Rotation of the native library: values and derivatives equal those of the definition."""

from __future__ import annotations

import numpy as np
import pytest

from tests.ops.native_cases import assert_precise, assert_selected, kernels, needs_library, single  # noqa: F401
from tests.ops.numpy_cases import assert_same
from xformer import vjp
from xformer.ops import rotate

pytestmark = needs_library


@pytest.mark.parametrize("half", [0, 2, 3])  # of 7 features
@pytest.mark.parametrize("length", [0, 1, 5])
def test_layouts(monkeypatch, half, length):
    angles = single(length, 2 * half)[:, ::2]
    for x in (single(2, 3, length, 7), single(2, length, 3, 14, seed=1).transpose((0, 2, 1, 3))[..., ::2]):
        assert_selected("rotate", x, np.cos(angles), np.sin(angles))
        assert_same(monkeypatch, lambda x: rotate(x, np.cos(angles), np.sin(angles)), x)


@pytest.mark.parametrize("features", [32, 33, 34, 64, 67, 70, 140])
def test_sizes(features):
    for half in {features // 2, features // 2 - 3}:
        angles = single(9, half)
        constant = {dtype: (np.cos(angles.astype(dtype)), np.sin(angles.astype(dtype))) for dtype in ("f4", "f8")}
        assert_precise(
            lambda x, c=constant: rotate(x, *c["f4" if x.dtype == "f4" else "f8"]), single(2, 3, 9, features)
        )


def test_special_values_stay_in_their_pair():
    x, ones = single(1, 1, 1, 8), np.ones((1, 3), "float32")
    x[..., 1], x[..., 6] = np.nan, np.inf
    output, pull = vjp(lambda x: rotate(x, ones, ones), x)
    for y in (output, pull(x)[0]):
        np.testing.assert_array_equal(np.isfinite(y[0, 0, 0]), [True, False, True, True, False, True, False, True])
