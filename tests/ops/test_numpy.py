"""NumPy without the native library: the portable definitions run where no kernel does."""

from __future__ import annotations

import numpy as np
import pytest

from tests.ops.numpy_cases import normal
from xformer import ops, vjp
from xformer.ops import attention, dropout, linear, relu

pytestmark = pytest.mark.usefixtures("no_native")


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("odd", [np.inf, -np.inf, np.nan])
def test_dropped_elements_are_zero_even_if_not_finite(dtype, odd):
    x, keep = np.asarray([1.0, -2.0, 3.0, odd], dtype), np.asarray([True, True, False, False])
    np.testing.assert_array_equal(dropout(x, keep, 0.5), [2.0, -4.0, 0.0, 0.0])
    _, pull = vjp(relu, np.asarray([1.0, 1.0, -1.0, -1.0], dtype))
    np.testing.assert_array_equal(pull(x)[0], [1.0, -2.0, 0.0, 0.0])
    # Elements that are not dropped stay the same.
    np.testing.assert_array_equal(dropout(x[::-1], keep, 1.0), [odd, 3.0, 0.0, 0.0])


HALF, SINGLE = np.ones((2, 3), "float16"), np.ones((2, 3), "float32")
FOUR = np.ones((1, 1, 2, 3), "float32")
ATTENTION = {"causal": False, "scale": 1.0, "keep_probability": 1.0}
UNSUPPORTED = {
    "adam": (None, HALF.copy(), HALF, SINGLE.copy(), SINGLE.copy()),
    "attention": (FOUR, FOUR, FOUR, None, np.ones((2, 2)), None),
}


@pytest.mark.parametrize("operation", UNSUPPORTED)
def test_explain_gives_the_reason(operation):
    options = ATTENTION if operation == "attention" else {}
    first, *lines = ops.explain(operation, *UNSUPPORTED[operation], **options).splitlines()
    (line,) = (line for line in lines if line.startswith("  not numpy."))
    assert "mixed dtypes" in line
    assert first == f"{operation} on numpy: portable definition"


def test_the_portable_definition_runs_what_kernels_do_not_support():
    half = normal(2, 3).astype("float16")
    assert linear(half, half.T).dtype == np.float16
    assert attention(*(normal(5, 3, seed=i) for i in range(3))).shape == (5, 3)
    wide = attention(normal(2, 1, 4, 3), *(normal(1, 2, 6, 3, seed=i) for i in (1, 2)))
    assert wide.shape == (2, 2, 4, 3)
    spread = dropout(normal(2, 3), np.asarray([[True, False, True]]), 0.5)
    assert spread.shape == (2, 3)
    assert (spread[:, 1] == 0).all()
