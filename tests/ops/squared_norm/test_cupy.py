"""The squared norm on CuPy equals the portable definition."""

from __future__ import annotations

import numpy as np
import pytest

from tests.ops._cupy.cuda_cases import DTYPES, normal
from tests.reference import raises_line
from xformer import ops
from xformer.errors import ShapeError
from xformer.kernels.cupy import optimizer
from xformer.ops import squared_norm

SHAPES = [(3, 5), (7,), (), (0, 4), (2, 5000), (64,)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("most", [128, 2], ids=["one launch", "several"])
def test_squared_norm(cuda, monkeypatch, dtype, most):
    monkeypatch.setattr(optimizer, "MAX_ARRAYS", most)
    arrays = [np.asarray(normal(*shape, seed=place)) for place, shape in enumerate([*SHAPES, (9000,)])]
    assert cuda.served("squared_norm", *(cuda.array(array, dtype) for array in arrays))
    cuda.agree(squared_norm, *arrays, dtype=dtype)
    cuda.agree(squared_norm, normal(0, 3), dtype=dtype)


def test_the_squared_norm_of_mixed_dtypes(cuda):
    cuda.agree(
        squared_norm, normal(5, 3), normal(70, seed=1), normal(4, seed=2), dtype=("bfloat16", "float32", "float16")
    )
    mixed = [cuda.array(np.ones(3), dtype) for dtype in ("float64", "float32")]
    assert "  not cupy.squared_norm: mixed dtypes: float64 and others" in ops.explain("squared_norm", *mixed)
    ints = cuda.array(np.ones(3, int))
    with raises_line(ShapeError, r"squared_norm got x\[0\] of dtype int64; expected a floating dtype"):
        ops.explain("squared_norm", ints)
