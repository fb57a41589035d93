"""Sinusoidal positions beyond the golden table."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tests.conftest import assert_close
from xformer.layers import sinusoidal


@pytest.mark.parametrize("d_model", [1, 7, 8])
def test_every_entry_follows_the_formula(d_model):
    table = sinusoidal(70, d_model, start=60, xp=np, dtype=np.float64)
    assert table.shape == (70, d_model)
    for row in (0, 3, 4, 69):
        for feature in range(d_model):
            angle = (60 + row) / 10000.0 ** (2 * (feature // 2) / d_model)
            assert table[row, feature] == pytest.approx((math.sin, math.cos)[feature % 2](angle), abs=1e-12)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_values_and_dtype_in_every_library(xp, dtype):
    angle = np.arange(2, 7)[:, None] / 10000.0 ** (np.arange(0, 6, 2) / 6)
    expected = np.stack([np.sin(angle), np.cos(angle)], axis=-1).reshape(5, 6).astype(dtype)  # rounded once
    assert_close(sinusoidal(5, 6, start=2, xp=xp, dtype=getattr(xp, dtype)), expected, xp=xp, tolerance=0.0)


def test_the_table_cannot_be_changed_through_what_was_handed_out():
    table = sinusoidal(4, 6, xp=np, dtype=np.float64)
    expected = table.copy()
    with pytest.raises(ValueError, match="read-only"):
        table += 1.0
    assert_close(sinusoidal(4, 6, xp=np, dtype=np.float64), expected, tolerance=0.0)
