"""The definitions of the norms, with the defaults of their arguments."""

from __future__ import annotations

import numpy as np
import pytest

from tests.conftest import assert_close
from tests.reference import normal
from xformer.backends import from_host
from xformer.ops import layer_norm, rms_norm

WEIGHT, BIAS = normal(1, 8), normal(2, 8)


@pytest.mark.parametrize("settings", [{}, {"epsilon": 1e-5}, {"epsilon": 0.1}], ids=str)
def test_norms_are_their_formulas(xp, settings):
    x, epsilon = 0.01 * normal(0, 3, 8), settings.get("epsilon", 1e-5)  # of the order of epsilon when squared
    weight, bias, rows = (from_host(xp, array) for array in (WEIGHT, BIAS, x))
    centered = x - np.mean(x, axis=-1, keepdims=True)
    expected = centered / np.sqrt(np.var(x, axis=-1, keepdims=True) + epsilon) * WEIGHT + BIAS
    assert_close(layer_norm(rows, weight, bias, **settings), expected, xp=xp)
    expected = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + epsilon) * WEIGHT
    assert_close(rms_norm(rows, weight, **settings), expected, xp=xp)
