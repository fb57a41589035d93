"""Sums of arrays on CuPy."""

from __future__ import annotations

import numpy as np
import pytest

from tests.ops._cupy.cuda_cases import DTYPES, normal
from xformer.backends import to_host
from xformer.kernels.cupy.elementwise import add


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(3, 5, 7), (), (0, 4), (64, 300)], ids=str)
def test_add(cuda, dtype, shape):
    x, y = (cuda.array(normal(*shape, seed=seed), dtype) for seed in range(2))
    np.testing.assert_array_equal(to_host(add(x, y)), to_host(x + y))


def test_add_supports_contiguous_arrays_of_one_dtype(cuda):
    x = cuda.array(normal(4, 4), "float32")
    others = x.T, cuda.array(normal(4, 4), "float64"), cuda.array(np.ones((4, 4), int))
    assert all(add(*pair) is None for other in others for pair in ((x, other), (other, x)))
