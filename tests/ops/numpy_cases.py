"""Arrays and comparisons for the tests of kernels for NumPy."""

from __future__ import annotations

import os

import numpy as np

from xformer import vjp

TOLERANCES = {"float32": 2e-5, "float64": 1e-11}


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape)


def both_ways(monkeypatch, function, *arrays):
    """Return output and cotangents of `function`, by kernels and by the portable definition, on read-only arrays."""
    for array in arrays:
        array.flags.writeable = False
    results, kernels_in_use = [], os.environ["XFORMER_KERNELS"]
    for mode in (kernels_in_use, "portable"):
        monkeypatch.setenv("XFORMER_KERNELS", mode)
        untraced = function(*arrays)
        output, pull = vjp(function, *arrays)
        assert_close(untraced, output)
        cotangent = normal(*output.shape, seed=9).astype(output.dtype)
        cotangent.flags.writeable = False
        results.append([np.asarray(output), *pull(cotangent)])
    monkeypatch.setenv("XFORMER_KERNELS", kernels_in_use)
    return results


def assert_close(actual, expected):
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    assert np.isfinite(actual).all()
    scale = max(1.0, np.max(np.abs(expected), initial=0.0))
    np.testing.assert_allclose(actual, expected, rtol=0.0, atol=TOLERANCES[expected.dtype.name] * scale)


def assert_same(monkeypatch, function, *arrays):
    by_kernel, portable = both_ways(monkeypatch, function, *arrays)
    for actual, expected in zip(by_kernel, portable, strict=True):
        assert_close(actual, expected)


LAYOUTS = {
    "plain": normal(3, 5, 7),
    "one row": normal(7),
    "matrix": normal(5, 7),
    "empty batch": normal(0, 5, 7),
    "every other": normal(3, 5, 14)[..., ::2],
    "axes swapped": normal(5, 3, 7).swapaxes(0, 1),
    "features first": normal(7, 5).T,
    "reversed": normal(3, 5, 7)[:, ::-1],
    "several blocks": normal(9000, 7),
}


def with_layout(name, dtype):
    """Return LAYOUTS[name] in another dtype with the same strides."""
    x = LAYOUTS[name]
    if x.base is None:
        return x.astype(dtype)
    base = x.base.astype(dtype)
    offset = (x.ctypes.data - x.base.ctypes.data) // x.itemsize * base.itemsize
    strides = tuple(stride // x.itemsize * base.itemsize for stride in x.strides)
    return np.ndarray(x.shape, dtype, base, offset, strides)


LABELS = {
    "some padding": [[3, 0, 12, 5], [1, 7, 0, 0]],
    "all padding": [[0, 0, 0, 0], [0, 0, 0, 0]],
    "no padding": [[3, 1, 12, 5], [1, 7, 1, 2]],
}


# Not 5 features: OpenBLAS 0.3.31 with AVX-512 multiplies (m, 5) by a vector with lanes that nobody wrote, and what lies
# there may raise the flag of an invalid value, though the product is right.
BATCH, HEADS, HEAD_DIM = 3, 2, 7
LENGTHS = [(6, 6), (4, 7), (7, 4), (1, 6), (1, 1)]  # queries, keys
MASKS = ["none", "padding", "full", "queries and keys", "some rows masked", "a sentence masked"]


def make_mask(kind, queries, keys):
    rng = np.random.default_rng(5)
    if kind == "none":
        return None
    if kind in ("padding", "a sentence masked"):
        lengths = np.asarray([keys, max(1, keys - 2), 0 if kind == "a sentence masked" else 1])
        return (np.arange(keys) < lengths[:, None])[:, None, None]
    if kind == "queries and keys":
        return rng.random((queries, keys)) < 0.6
    mask = rng.random((BATCH, HEADS, queries, keys)) < 0.6
    if kind == "some rows masked":
        mask[1, :, queries // 2] = False
    return mask


def heads(length, features, dtype, seed):
    """Return (batch, heads, length, features) in the memory order (batch, length, heads, features)."""
    return normal(BATCH, length, HEADS, features, seed=seed).astype(dtype).transpose(0, 2, 1, 3)


def memory_orders(dtype):
    yield normal(7, 5).astype(dtype)
    yield np.asfortranarray(normal(7, 5).astype(dtype))
    yield normal(100_003).astype(dtype)
    yield normal(0, 5).astype(dtype)
