"""logsumexp, log_softmax and top_k: every kernel against a sort by NumPy, and in jit."""

import math

import numpy as np
import pytest

import xformer as xf
from tests.conftest import assert_close
from tests.reference import for_each
from xformer import native
from xformer.backends import extra, from_host, to_host
from xformer.errors import ConfigError, ShapeError
from xformer.ops import explain, logsumexp, top_k
from xformer.ops.decoding import log_softmax

X = np.random.default_rng(0).normal(size=(3, 2, 1033)).astype(np.float32)


def check(xp, x, k):
    values, indices = top_k(from_host(xp, x), k)
    order = np.argsort(-x, axis=-1, kind="stable")[..., :k]
    np.testing.assert_array_equal(to_host(indices), order)
    np.testing.assert_array_equal(to_host(values), np.take_along_axis(x, order, axis=-1))


@for_each("k", [1, 2, 64, 65, 256, 257, 1033])
def test_top_k(xp, k):
    check(xp, X, k)


@for_each("size", [1, 15, 16, 63, 64, 65, 130])
def test_top_k_of_few(xp, size):
    for k in {1, size, (size + 1) // 2}:
        check(xp, np.ascontiguousarray(X[0, :, :size]), k)


def test_of_equal_values_top_k_takes_lower_indices_first(xp):
    check(xp, np.round(X), 9)
    check(xp, np.full((2, 200), -math.inf, np.float32), 3)
    check(xp, np.tile(np.asarray([-math.inf, 2.0, math.inf, 2.0], np.float32), (2, 50)), 60)


@for_each("dtype", ["float32", "float64"])
def test_logsumexp(xp, dtype):
    x = 30.0 * X.astype(dtype)
    expected = np.log(np.sum(np.exp(x.astype("float64")), axis=-1, keepdims=True))
    result = logsumexp(from_host(xp, x))
    assert_close(result, expected, xp=xp, dtype=dtype)
    assert (to_host(result) >= np.max(x, axis=-1, keepdims=True)).all()
    assert to_host(logsumexp(from_host(xp, np.asarray([[0.0, -math.inf]], dtype)))).item() == 0.0


@pytest.mark.parametrize("mode", ["auto", "portable"])
@pytest.mark.parametrize("offset", [1e6, -1e6])
def test_log_softmax_of_large_elements(xp, monkeypatch, mode, offset):
    torch = pytest.importorskip("torch", reason="torch is what it is compared with")
    monkeypatch.setenv("XFORMER_KERNELS", mode)
    x = np.round(8.0 * X[0]) / 8.0  # exact in float32 with the offset, too
    expected = torch.log_softmax(torch.tensor(x, dtype=torch.float64), -1).numpy()
    shifted = from_host(xp, x + np.float32(offset))
    result = to_host(log_softmax(shifted))
    np.testing.assert_allclose(result, expected, rtol=1e-6)
    np.testing.assert_array_equal(to_host(log_softmax(shifted, shifted[:, 3:5])), result[:, 3:5])


@pytest.mark.parametrize("mode", ["auto", "portable"])
def test_log_softmax_without_a_finite_element_is_nan(monkeypatch, mode):
    monkeypatch.setenv("XFORMER_KERNELS", mode)
    x = np.asarray([[-math.inf, -math.inf], [-math.inf, 2.0]], np.float32)
    np.testing.assert_array_equal(log_softmax(x), [[math.nan, math.nan], [-math.inf, 0.0]])


def test_kernels_agree_with_the_definition_and_take_no_rows():
    if native.is_available():
        lines = explain(lambda: (top_k(X, 3), logsumexp(X))).splitlines()
        assert lines == ["top_k on numpy: native.top_k", "logsumexp on numpy: native.logsumexp"]
    for x, k in ((X[:, :0], 3), (X[..., ::2], 5), (np.asfortranarray(X[0]), 1)):
        for result, expected in zip(top_k(x, k), extra.top_k(x, k), strict=True):
            np.testing.assert_array_equal(result, expected)
    assert logsumexp(X[:, :0]).shape == (3, 0, 1)


def test_jit_returns_the_bits_of_the_function():
    def function(x):
        return (*top_k(x, 5), logsumexp(x))

    jitted = xf.jit(function)
    for x in (X, -X, X[::-1].copy()):
        for result, expected in zip(jitted(x), function(x), strict=True):
            np.testing.assert_array_equal(result, expected)


def test_invalid_calls_are_refused(xp):
    x = from_host(xp, X)
    with pytest.raises(ShapeError, match=r"k is 1034 for shape \(3, 2, 1033\); expected 1 to the size"):
        top_k(x, 1034)
    for k in (0, -1, 2.0, True, "2", None):
        with pytest.raises(ConfigError, match=r"k is .*; expected an integer of at least 1"):
            top_k(x, k)
    with pytest.raises(ShapeError, match="expected n > 0"):
        logsumexp(x[..., :0])
