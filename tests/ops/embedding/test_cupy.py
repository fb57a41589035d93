"""Embedding on CuPy equals the portable definition."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from tests.ops._cupy.cuda_cases import DTYPES, normal
from tests.reference import for_each
from xformer import ops
from xformer.backends import to_host
from xformer.kernels.cupy import rows as cupy_rows
from xformer.ops import embedding

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
@pytest.mark.parametrize("ids", IDS)
@pytest.mark.parametrize("segment", [64, 7])
def test_embedding(cuda, monkeypatch, dtype, ids, segment):
    """Ids that stand in one piece, in two, and in many; 12 features are one chunk and a half of 16 bytes."""
    monkeypatch.setattr(cupy_rows, "_SEGMENT", segment)
    table, host_ids = normal(11, 12), np.asarray(IDS[ids], dtype="int64")
    assert cuda.served("embedding", cuda.array(table, dtype), cuda.array(host_ids), scale=1.0)
    for scale in (1.0, 1.7):
        cuda.agree(functools.partial(embedding, scale=scale), table, host_ids, dtype=dtype)


@for_each("id_dtype", ["int32", "uint16", "uint64"])
def test_ids_of_any_integer_dtype(cuda, id_dtype):
    ids = np.asarray([[3, 1], [3, 0]], id_dtype)
    got = embedding(cuda.array(normal(5, 3)), cuda.array(ids))
    np.testing.assert_array_equal(to_host(got), normal(5, 3)[ids.astype(int)])


def test_an_id_out_of_range_gives_nan_and_no_gradient(cuda):
    """Ids on a GPU are not read on the host."""
    kernel = next(each for each in cupy_rows.KERNELS if each.operation == "embedding")
    rows, residuals = kernel.forward(cuda.array(normal(5, 3)), cuda.array([-1, 5, 2, 4]), scale=1.0, save=True)
    assert np.isnan(to_host(rows)).all(axis=-1).tolist() == [True, True, False, False]
    dtable, _ = kernel.vjp(cuda.xp.ones_like(rows), residuals, (True, False), scale=1.0)
    np.testing.assert_array_equal(to_host(dtable)[:, 0], [0, 0, 1, 0, 1])


def test_a_weight_that_is_not_contiguous_is_not_supported(cuda):
    table = cuda.array(normal(3, 5)).T
    assert "  not cupy.embedding: the weight is not contiguous" in ops.explain(
        "embedding", table, cuda.array([1]), scale=1.0
    )
