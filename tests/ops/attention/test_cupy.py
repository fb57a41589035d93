"""Attention by batched products equals the portable definition, with a fake cuBLAS that reads memory as cuBLAS does."""

from __future__ import annotations

import numpy as np
import pytest

from tests.conftest import TOLERANCES, library_or_skip
from tests.ops._cupy.fake_cublas import HANDLE, Binding, dtype_named
from tests.ops.replace_kernels import replace_kernels
from tests.reference import for_each
from xformer import ops, vjp
from xformer.backends import to_host
from xformer.kernels.cupy import attention as cupy_attention
from xformer.kernels.cupy import cublas, launch
from xformer.ops import attention

DTYPES = ["float16", "bfloat16", "float32", "float64"]
LENGTHS = [(5, 5), (4, 7), (7, 4), (1, 6)]


def serve_numpy(monkeypatch, kernels):
    """Have kernels for CuPy serve NumPy arrays, on cuBLAS in memory."""
    binding = Binding()
    monkeypatch.setenv("XFORMER_KERNELS", "auto")
    monkeypatch.setattr(cublas, "binding_and_handle", lambda: (binding, HANDLE))
    monkeypatch.setattr(cublas, "pointer", lambda array: array.ctypes.data)
    monkeypatch.setattr(launch, "is_current_device", lambda array: True)
    replace_kernels(monkeypatch, "numpy", {"attention": kernels})
    return binding


@pytest.fixture
def fake_cublas(monkeypatch):
    return serve_numpy(monkeypatch, cupy_attention.KERNELS[:1])


def normal(*shape, seed=0, dtype="float64"):
    return np.random.default_rng(seed).normal(size=shape).astype(dtype_named(dtype))


def heads(batch, count, length, features, seed=0, dtype="float64"):
    """(batch, heads, length, features) as layers make them: heads beside one another in memory."""
    return normal(batch, length, count, features, seed=seed, dtype=dtype).transpose(0, 2, 1, 3)


def make_mask(kind, batch, count, queries, keys):
    """Masks of all shapes; each closes some query to all keys."""
    rng = np.random.default_rng(6)
    if kind is None:
        return None
    if kind == "padding":
        mask = np.arange(keys) < rng.integers(1, keys + 1, size=(batch, 1, 1, 1))
        mask[-1] = False
        return mask
    if kind == "left":  # with a causal mask, the first queries see nothing
        return np.broadcast_to(np.arange(keys) >= min(2, keys - 1), (batch, 1, 1, keys)).copy()
    shape = {"queries": (queries, keys), "heads": (batch, count, queries, keys), "rows": (batch, 1, queries, 1)}[kind]
    mask = rng.random(shape) < 0.7
    mask[..., 0, :] = False
    return mask


MASKS = [None, "padding", "left", "queries", "heads", "rows"]


def pulled(function, *arrays):
    output, pull = vjp(function, *arrays)
    g = normal(*output.shape, seed=9).astype(output.dtype)
    return [output, *pull(g)]


def assert_same(monkeypatch, function, *arrays, tolerance=None):
    """A kernel's output and cotangents are those of the portable definition in float64."""
    untraced, got = function(*arrays), pulled(function, *arrays)
    monkeypatch.setenv("XFORMER_KERNELS", "portable")
    expected = pulled(function, *(array.astype("float64") for array in arrays))
    monkeypatch.setenv("XFORMER_KERNELS", "auto")
    np.testing.assert_array_equal(untraced, got[0])
    for actual, exact, like in zip(got, expected, [arrays[0], *arrays], strict=True):
        assert actual.dtype == like.dtype
        assert actual.shape == exact.shape
        assert np.isfinite(actual.astype("float64")).all()
        largest = max(1.0, np.max(np.abs(exact), initial=0.0))
        limit = (TOLERANCES[actual.dtype.name] if tolerance is None else tolerance) * largest
        np.testing.assert_allclose(actual.astype("float64"), exact, rtol=0.0, atol=limit)


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", MASKS)
def test_masks(monkeypatch, fake_cublas, dtype, lengths, causal, kind):
    queries, keys = lengths
    mask = make_mask(kind, 2, 3, queries, keys)
    arrays = (
        heads(2, 3, queries, 5, dtype=dtype),
        heads(2, 3, keys, 5, seed=1, dtype=dtype),
        heads(2, 3, keys, 4, 2, dtype),
    )
    static = {"causal": causal, "scale": 0.3, "keep_probability": 1.0}
    assert ": cupy.attention" in ops.explain("attention", *arrays, mask, None, None, **static)
    assert_same(monkeypatch, lambda *qkv: attention(*qkv, mask, causal=causal), *arrays)
    assert fake_cublas.calls


def test_fully_masked_rows_give_zeros_and_zero_gradients(fake_cublas):
    arrays = [heads(2, 3, 4, 8, seed=seed, dtype="float16") for seed in range(3)]
    mask = make_mask("padding", 2, 3, 4, 4)
    output, dquery, dkey, dvalue = pulled(lambda *qkv: attention(*qkv, mask), *arrays)
    assert not output[-1].any()
    assert not dquery[-1].any()
    assert not dkey[~np.broadcast_to(mask.swapaxes(2, 3), dkey.shape)].any()
    assert not dvalue[-1].any()
    assert dvalue[0].any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(2, 3, 5, 6), (1, 3, 5, 6), (3, 1, 6), (6,)], ids=str)
def test_the_gradient_of_a_bias(monkeypatch, fake_cublas, dtype, shape):
    arrays = heads(2, 3, 5, 8, 0, dtype), heads(2, 3, 6, 8, 1, dtype), heads(2, 3, 6, 8, 2, dtype)
    bias, mask = normal(*shape, seed=4, dtype=dtype), make_mask("queries", 2, 3, 5, 6)
    assert_same(monkeypatch, lambda *all_: attention(*all_[:3], mask, all_[3]), *arrays, bias)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_dropout(monkeypatch, fake_cublas, dtype):
    arrays = [heads(2, 3, 5, 8, seed, dtype) for seed in range(3)]
    keep = np.random.default_rng(7).random((2, 3, 5, 5)) < 0.8
    assert_same(
        monkeypatch, lambda *qkv: attention(*qkv, dropout_mask=keep, keep_probability=0.8, causal=True), *arrays
    )


@pytest.mark.parametrize("shapes", [((2, 3, 5), (1, 4, 5)), ((0, 3, 5, 4), (0, 3, 6, 4)), ((2, 3, 5, 4), (1, 3, 6, 4))])
def test_other_shapes(monkeypatch, fake_cublas, shapes):
    query, key = normal(*shapes[0]), normal(*shapes[1], seed=1)
    assert_same(monkeypatch, attention, query, key, normal(*shapes[1][:-1], 7, seed=2))


def test_only_needed_cotangents_are_computed(fake_cublas):
    query, key, value = (heads(1, 2, 4, 8, seed) for seed in range(3))
    static = {"causal": False, "scale": 0.5, "keep_probability": 1.0}
    output, residuals = cupy_attention.forward(query, key, value, None, None, None, **static, save=True)
    for needs, products in (((True, False, False), 2), ((False, True, False), 2), ((False, False, True), 1)):
        before = len(fake_cublas.calls)
        actual = cupy_attention.vjp(output, residuals, (*needs, False, False, False), **static)
        assert [each is not None for each in actual] == [*needs, False, False, False]
        assert len(fake_cublas.calls) - before == products


def test_mixed_dtypes_are_not_supported(fake_cublas):
    arrays = normal(1, 2, 3, 4, dtype="float32"), normal(1, 2, 3, 4), normal(1, 2, 3, 4)
    lines = ops.explain("attention", *arrays, None, None, None, causal=False, scale=1.0, keep_probability=1.0)
    assert "not cupy.attention: mixed dtypes (the kernel takes float16 or bfloat16 or float32 or float64)" in lines


@pytest.mark.gpu
@pytest.mark.usefixtures("no_native")
@for_each("dtype", DTYPES)
@for_each("kind", MASKS)
def test_on_the_gpu(dtype, kind):
    cupy = library_or_skip("cupy")
    arrays = [heads(2, 3, 65, 40, seed, dtype) for seed in range(3)]
    mask = make_mask(kind, 2, 3, 65, 65)
    expected = pulled(lambda *qkv: attention(*qkv, mask, causal=True), *(array.astype("float64") for array in arrays))
    on_device = None if mask is None else cupy.asarray(mask)
    output, pull = vjp(lambda *qkv: attention(*qkv, on_device, causal=True), *map(cupy.asarray, arrays))
    g = normal(*output.shape, seed=9).astype(output.dtype)
    for actual, exact in zip([output, *pull(cupy.asarray(g))], expected, strict=True):
        limit = TOLERANCES[dtype] * max(1.0, float(np.max(np.abs(exact))))
        np.testing.assert_allclose(to_host(actual).astype("float64"), exact, rtol=0, atol=limit)
