"""Casts on CuPy have the bits of NumPy."""

from __future__ import annotations

import numpy as np
import pytest

from tests.ops._cupy.cuda_cases import normal
from tests.ops._cupy.cuda_on_host import CASTS
from xformer import ops, vjp
from xformer.backends import resolve, to_host
from xformer.kernels.cupy import optimizer
from xformer.ops import cast

SHAPES = [(3, 5), (7,), (), (0, 4), (2, 5000), (64,)]


@pytest.mark.parametrize("most", [112, 2], ids=["one launch", "several"])
@pytest.mark.parametrize(("before", "after"), CASTS)
def test_cast_has_the_bits_of_numpy(cuda, monkeypatch, before, after, most):
    monkeypatch.setattr(optimizer, "MAX_PAIRS", most)
    special = np.array(
        [np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-41, 1e-7, 65519.0, 65520.0, 3e38, 1 + 2**-8, 1 + 3 * 2**-8]
    )
    if cuda.launcher is None:  # on a GPU: CuPy has subnormal numbers flushed to zero
        special[5] = 0.0
    shaped = [np.asarray(normal(*shape, seed=place)) for place, shape in enumerate([*SHAPES, (9000,)])]
    host = resolve("numpy")
    with np.errstate(over="ignore"):
        hosts = [x.astype(host.dtype_named(before)) for x in (special, *shaped, shaped[4].T)]
        expected = [x.astype(host.dtype_named(after)) for x in hosts]
    arrays = [cuda.array(x) for x in hosts]
    assert cuda.served("cast", *arrays, dtype=after)
    for got, reference in zip(cast(*arrays, dtype=after), expected, strict=True):
        assert got.dtype == reference.dtype
        np.testing.assert_array_equal(to_host(got).astype("float64"), reference.astype("float64"))


def test_the_cotangents_of_a_cast(cuda):
    arrays = [cuda.array(normal(*shape), "float32") for shape in [(3, 5), (7,), (2, 600)]]
    outputs, pull = vjp(lambda *arrays: cast(*arrays, dtype="bfloat16")[::2], *arrays)
    g = [cuda.array(normal(*output.shape, seed=9), "bfloat16") for output in outputs]
    cotangents = pull(tuple(g))
    assert all(got.dtype == x.dtype and got.shape == x.shape for got, x in zip(cotangents, arrays, strict=True))
    for got, reference in zip(cotangents[::2], g, strict=True):
        np.testing.assert_array_equal(to_host(got), to_host(reference).astype("float32"))
    assert not to_host(cotangents[1]).any()


def test_a_cast_that_would_round_twice_is_not_supported(cuda):
    x = cuda.array(normal(3), "float64")
    assert "  not cupy.cast: float64 would be rounded" in ops.explain("cast", x, dtype="float16")
