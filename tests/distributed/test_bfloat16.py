"""Rounding to bfloat16 agrees with ml_dtypes."""

from __future__ import annotations

import numpy as np
import pytest

from xformer.distributed import from_bits, to_bits

ml_dtypes = pytest.importorskip("ml_dtypes")


def values():
    bits = np.random.default_rng(0).integers(0, 2**32, 200_000, dtype=np.uint32)
    special = [0.0, -0.0, np.inf, -np.inf, np.nan, 1.0, 1.00390625, 1.01171875, 3.4e38, np.finfo(np.float32).max, 1e-45]
    return np.concat([bits.view(np.float32), np.asarray(special, np.float32)])


def test_values_are_rounded_to_the_nearest_even():
    x = values()
    with np.errstate(invalid="ignore"):
        expected = x.astype(ml_dtypes.bfloat16)
    is_nan = np.isnan(x)
    np.testing.assert_array_equal(to_bits(x)[~is_nan], expected.view(np.uint16)[~is_nan])
    np.testing.assert_array_equal(from_bits(to_bits(x)), expected.astype(np.float32))
