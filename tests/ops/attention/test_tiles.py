"""Attention without scores in memory equals the portable definition, by the CUDA source on the CPU."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from tests.conftest import library_or_skip
from tests.ops.attention.test_cupy import DTYPES, MASKS, assert_same, heads, make_mask, normal, serve_numpy
from tests.reference import for_each
from xformer import ops, vjp
from xformer.backends.numpy import NumpyLibrary
from xformer.kernels.cupy import attention as cupy_attention
from xformer.kernels.cupy import launch
from xformer.ops import attention

STATIC = {"causal": False, "scale": 0.3, "keep_probability": 1.0}
TOLERANCE = {"float32": 1e-4, "bfloat16": 0.03, "float16": 4e-3}


@pytest.fixture
def tiles(monkeypatch, launcher):
    """Have our kernel serve NumPy arrays; products compute only the gradient of a bias."""
    binding = serve_numpy(monkeypatch, cupy_attention.KERNELS[::-1])
    monkeypatch.setattr(launch, "launch", launcher.launch)
    launcher.launched.clear()
    launcher.binding = binding
    return launcher


def qkv(queries, keys, features=8, width=None, dtype="float32", batch=2, count=2, shared=None):
    shapes = (count, queries, features), (shared or count, keys, features), (shared or count, keys, width or features)
    return [heads(batch, *shape, seed, dtype) for seed, shape in enumerate(shapes)]


def agree(monkeypatch, tiles, *arrays, **given):
    """Compare a call with the definition, and expect three launches: forward, queries, keys and values."""
    dtype = arrays[0].dtype.name
    assert_same(monkeypatch, functools.partial(attention, **given), *arrays, tolerance=TOLERANCE[dtype])
    names = [name.partition("<")[0] for name in tiles.launched]
    assert names == ["attention.attention"] * 2 + ["attention.attention_vjp"] * 2
    assert not tiles.binding.calls
    tiles.launched.clear()


@pytest.mark.parametrize("lengths", [(5, 5), (33, 70), (70, 33), (1, 6), (40, 32)], ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", MASKS)
def test_masks(monkeypatch, tiles, lengths, causal, kind):
    agree(monkeypatch, tiles, *qkv(*lengths), mask=make_mask(kind, 2, 2, *lengths), causal=causal)


@pytest.mark.parametrize("lengths", [(40, 40), (100, 100), (70, 100), (100, 70)], ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [1, 20, 64])
def test_windows(monkeypatch, tiles, lengths, causal, window):
    """With a mask of padding, and without a mask of queries and keys."""
    monkeypatch.setattr(NumpyLibrary, "has_windows", True)
    mask = make_mask("padding", 2, 1, *lengths)
    agree(monkeypatch, tiles, *qkv(*lengths, count=1), mask=mask, causal=causal, window=window)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("sizes", [(32, 32), (64, 64), (128, 128), (5, 7), (1, 40), (96, 12)], ids=str)
def test_features_and_dtypes(monkeypatch, tiles, dtype, sizes):
    agree(monkeypatch, tiles, *qkv(19, 37, *sizes, dtype=dtype), causal=True)


@pytest.mark.parametrize("shared", [1, 2])
@pytest.mark.parametrize("dropout", [False, True])
def test_heads_that_share_keys(monkeypatch, tiles, shared, dropout):
    keep = np.random.default_rng(3).random((2, 4, 35, 35)) < 0.7
    given = {"dropout_mask": keep, "keep_probability": 0.7} if dropout else {}
    agree(monkeypatch, tiles, *qkv(35, 35, count=4, shared=shared), causal=True, **given)


@pytest.mark.parametrize("shape", [(2, 2, 6, 6), (2, 1, 6), (6,), (2, 1, 1, 6), ()], ids=str)
def test_a_bias(monkeypatch, tiles, shape):
    bias, mask = np.asarray(normal(*shape, seed=4, dtype="float32")), make_mask("heads", 2, 2, 6, 6)
    agree(monkeypatch, tiles, *qkv(6, 6), mask=mask, bias=bias)
    assert_same(monkeypatch, lambda *all_: attention(*all_[:3], mask, all_[3]), *qkv(6, 6), bias, tolerance=1e-4)
    assert tiles.binding.calls  # of the gradient of the bias


def test_rows_without_keys_are_zero(tiles):
    arrays, mask, bias = qkv(6, 6), make_mask("queries", 2, 2, 6, 6), np.zeros((6, 6), "float32")
    bias[3] = -np.inf
    output, pull = vjp(lambda *qkv: attention(*qkv, mask, bias), *arrays)
    for array in (output, pull(output)[0]):
        assert np.isfinite(array).all()
        assert not array[:, :, [0, 3]].any()
        assert array[:, :, [1, 2, 4, 5]].all()


MEMORY = {
    "packed by heads": np.ascontiguousarray,
    "beside others": lambda x: np.concatenate([x, x], axis=-1)[..., :8],
    "off the grid": lambda x: np.concatenate([x[..., :1], x, x[..., :2]], axis=-1)[..., 1:9],
    "every other feature": lambda x: np.repeat(x, 2, axis=-1)[..., ::2],
    "backwards": lambda x: x[:, :, ::-1],
    "one sentence for all": lambda x: np.broadcast_to(x[:1], x.shape),
}


@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_any_memory(monkeypatch, tiles, memory, dtype):
    arrays, mask = [MEMORY[memory](x) for x in qkv(9, 9, dtype=dtype)], make_mask("queries", 2, 2, 9, 9).T
    agree(monkeypatch, tiles, *arrays, mask=mask)


@pytest.mark.parametrize("shapes", [(0, 5), (5, 0)], ids=str)
def test_no_queries_or_keys(monkeypatch, tiles, shapes):
    output, pull = vjp(attention, *qkv(*shapes))
    assert not np.any(output)
    assert not any(np.any(each) for each in pull(output))


def test_a_row_depends_on_no_other_row_and_not_on_the_order_of_warps(tiles):
    """The same bits alone, in a batch, among more queries, and with warps the other way round."""
    query, key, value = qkv(40, 70, 64, batch=3)
    mask = np.random.default_rng(1).random((3, 1, 40, 70)) < 0.4
    mask[:, :, :, 33:] &= np.arange(40)[:, None] % 4 == 0
    together, pull = vjp(lambda *qkv: attention(*qkv, mask), query, key, value)
    cotangents = pull(together)
    tiles.backwards = True
    try:
        _, pull = vjp(lambda *qkv: attention(*qkv, mask[2:]), query[2:], key[2:], value[2:])
        for actual, expected in zip(pull(together[2:]), cotangents, strict=True):
            np.testing.assert_array_equal(actual, expected[2:])
        for row in (0, 7, 39):
            one = slice(row, row + 1)
            alone = attention(query[2:, :, one], key[2:], value[2:], mask[2:, :, one])
            np.testing.assert_array_equal(alone, together[2:, :, one])
    finally:
        tiles.backwards = False


def test_explain_gives_the_reason(tiles):
    def explained(*arrays):
        return ops.explain("attention", *arrays, None, None, None, **STATIC)

    assert ": cupy.attention_in_tiles" in explained(*qkv(4, 4))
    assert "not cupy.attention_in_tiles: heads of 129 and 8 features" in explained(*qkv(4, 4, 129, 8))
    assert "not cupy.attention_in_tiles: 15 queries of 129 keys" in explained(*qkv(15, 129))
    assert "not cupy.attention_in_tiles: dtype float64" in explained(*qkv(4, 4, dtype="float64"))


@pytest.mark.gpu
@for_each("dtype", DTYPES[:3])
@for_each("kind", MASKS)
def test_on_the_gpu(dtype, kind):
    cupy = library_or_skip("cupy")
    arrays, mask = qkv(65, 77, 40, 64, dtype), make_mask(kind, 2, 2, 65, 77)
    expected, pull = vjp(lambda *qkv: attention(*qkv, mask), *(array.astype("float64") for array in arrays))
    exact = [expected, *pull(expected)]
    on_device = None if mask is None else cupy.asarray(mask)
    output, pull = vjp(lambda *qkv: attention(*qkv, on_device), *map(cupy.asarray, arrays))
    for actual, each in zip([output, *pull(cupy.asarray(expected.astype(dtype)))], exact, strict=True):
        limit = TOLERANCE[dtype] * max(1.0, float(np.max(np.abs(each))))
        np.testing.assert_allclose(actual.get().astype("float64"), each, rtol=0, atol=limit)
