"""Activations, dropout and embedding on CuPy equal the portable definitions."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from tests.kernels.cupy.cuda_cases import DTYPES, LAYOUTS, normal
from xformer import kernels, vjp
from xformer.backends import dtype_named, to_host
from xformer.kernels.cupy import elementwise as cupy_elementwise
from xformer.ops import dropout, embedding, gelu, relu

SHAPES = [(3, 5, 7), (1,), (), (0, 4), (2, 3000), (64,)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
class TestShapes:
    def test_relu(self, cuda, dtype, shape):
        assert cuda.served("relu", cuda.array(normal(*shape), dtype))
        cuda.agree(relu, normal(*shape), dtype=dtype)

    def test_gelu(self, cuda, dtype, shape):
        assert cuda.served("gelu", cuda.array(normal(*shape), dtype))
        cuda.agree(gelu, 3.0 * normal(*shape), dtype=dtype)

    def test_dropout(self, cuda, dtype, shape):
        keep = np.asarray(np.random.default_rng(3).random(shape) < 0.7)
        assert cuda.served("dropout", cuda.array(normal(*shape), dtype), cuda.array(keep), keep_probability=0.7)
        cuda.agree(functools.partial(dropout, keep_probability=0.7), normal(*shape), keep, dtype=dtype)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("function", [relu, gelu])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_layouts(cuda, layout, function, dtype):
    cuda.agree(function, normal(6, 16), dtype=dtype, layout=LAYOUTS[layout])


def test_more_than_2_to_the_31_elements(cuda):
    """On a GPU; on the host a few."""
    x = -cuda.xp.ones(100 if cuda.launcher else 2**31 + 100, dtype=dtype_named(cuda.xp, "bfloat16"))
    x[-3] = 2.0
    y, pull = vjp(relu, x)
    for got, expected in ((y, [0.0, 2.0, 0.0, 0.0]), (pull(x)[0], [0.0, 2.0, 0.0, 0.0])):
        np.testing.assert_array_equal(to_host(got[-4:]), expected)
        assert not bool(cuda.xp.any(got[:-4] != 0))


def test_masks_of_any_layout(cuda):
    x, keep = normal(6, 16), np.random.default_rng(3).random((16, 6)) < 0.5
    got = dropout(cuda.array(x), cuda.array(keep).T, 0.5)
    np.testing.assert_array_equal(to_host(got), np.where(keep.T, 2.0 * x, 0.0))


def test_unsupported_masks(cuda):
    x = cuda.array(np.ones((2, 3)))
    for keep, reason in [
        (np.ones((2, 1), bool), "the mask is broadcast"),
        (np.ones((2, 3), np.int64), "mask of dtype int64 (kernels take bool)"),
    ]:
        said = kernels.explain("dropout", x, cuda.array(keep), keep_probability=0.5)
        assert f"  not cupy.dropout: {reason}" in said


@pytest.mark.parametrize("dtype", DTYPES)
def test_infinities_and_nan(cuda, dtype):
    x = cuda.array([1.0, -2.0, np.nan, np.inf, -np.inf, -0.0], dtype)
    np.testing.assert_array_equal(to_host(relu(x)), [1.0, 0.0, np.nan, np.inf, 0.0, 0.0])
    np.testing.assert_array_equal(to_host(gelu(x))[2:], [np.nan, np.inf, 0.0, 0.0])
    (slope,) = vjp(gelu, x)[1](cuda.xp.ones_like(x))
    np.testing.assert_array_equal(to_host(slope)[2:], [np.nan, 1.0, 0.0, 0.5])
    keep = cuda.array([True, True, False, False, True, False])
    np.testing.assert_array_equal(to_host(dropout(x, keep, 0.5)), [2.0, -4.0, 0.0, 0.0, -np.inf, 0.0])


# --- embedding ------------------------------------------------------------------

IDS = {
    "a matrix": [[3, 1, 3], [0, 3, 10]],
    "one": [[5]],
    "one many times": [10] * 20,
    "none": np.zeros((0, 3)),
    "no length": np.zeros((2, 0)),
    "many": np.random.default_rng(0).integers(0, 11, 130),
    "one of them often": np.where(np.arange(150) % 3 == 0, np.arange(150) % 11, 4),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(3, 5, 7), (), (0, 4), (64, 300)], ids=str)
def test_add(cuda, dtype, shape):
    x, y = (cuda.array(normal(*shape, seed=seed), dtype) for seed in range(2))
    np.testing.assert_array_equal(to_host(cupy_elementwise.add(x, y)), to_host(x + y))


def test_add_supports_contiguous_arrays_of_one_dtype(cuda):
    x = cuda.array(normal(4, 4), "float32")
    others = x.T, cuda.array(normal(4, 4), "float64"), cuda.array(np.ones((4, 4), int))
    assert all(cupy_elementwise.add(*pair) is None for other in others for pair in ((x, other), (other, x)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ids", IDS)
@pytest.mark.parametrize("segment", [64, 7])
def test_embedding(cuda, monkeypatch, dtype, ids, segment):
    """Ids that stand in one piece, in two, and in many; 12 features are one chunk and a half of 16 bytes."""
    monkeypatch.setattr(cupy_elementwise, "_SEGMENT", segment)
    table, host_ids = normal(11, 12), np.asarray(IDS[ids], dtype="int64")
    assert cuda.served("embedding", cuda.array(table, dtype), cuda.array(host_ids), scale=1.0)
    for scale in (1.0, 1.7):
        cuda.agree(functools.partial(embedding, scale=scale), table, host_ids, dtype=dtype)


@pytest.mark.parametrize("id_dtype", ["int32", "uint16", "uint64"])
def test_ids_of_any_integer_dtype(cuda, id_dtype):
    ids = np.asarray([[3, 1], [3, 0]], id_dtype)
    got = embedding(cuda.array(normal(5, 3)), cuda.array(ids))
    np.testing.assert_array_equal(to_host(got), normal(5, 3)[ids.astype(int)])


def test_an_id_out_of_range_gives_nan_and_no_gradient(cuda):
    ids = cuda.array(np.asarray([-1, 5, 2, 4]))
    rows, pull = vjp(lambda table: embedding(table, ids), cuda.array(normal(5, 3)))
    assert np.isnan(to_host(rows)).all(axis=-1).tolist() == [True, True, False, False]
    (dtable,) = pull(cuda.xp.ones_like(rows))
    np.testing.assert_array_equal(to_host(dtable)[:, 0], [0, 0, 1, 0, 1])


def test_a_weight_that_is_not_contiguous_is_not_supported(cuda):
    table = cuda.array(normal(3, 5)).T
    assert "  not cupy.embedding: the weight is not contiguous" in kernels.explain(
        "embedding", table, cuda.array([1]), scale=1.0
    )
