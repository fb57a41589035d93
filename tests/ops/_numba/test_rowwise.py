"""Compiled rowwise kernels: values and gradients equal those of the portable definitions."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from tests.ops.activations.test_numpy import definition
from tests.ops.numpy_cases import LABELS, LAYOUTS, assert_close, assert_same, memory_orders, normal, with_layout
from xformer import ops, vjp
from xformer.ops import (
    attention,
    cross_entropy,
    dropout,
    gelu,
    gelu_tanh,
    kernel_check,
    layer_norm,
    linear,
    relu,
    rms_norm,
    rotate,
    silu,
)
from xformer.ops.adam import adam
from xformer.ops.linear.definition import project_heads

pytest.importorskip("numba")


@pytest.fixture(autouse=True)
def compiled(monkeypatch):
    """Enable the kernels."""
    monkeypatch.setenv("XFORMER_KERNELS", "auto")


def single(*shape, seed=0):
    return normal(*shape, seed=seed).astype("float32")


def assert_selected(operation, *arrays, **static):
    first = ops.explain(operation, *arrays, **static).splitlines()[0]
    assert first == f"{operation} on numpy: numba.{operation}"


# --- elementwise and norms ------------------------------------------------------------------


@pytest.mark.parametrize("half", [2, 3])  # of 7 features
@pytest.mark.parametrize("length", [0, 1, 5])
def test_rotate(monkeypatch, half, length):
    angles = single(length, 2 * half)[:, ::2]
    for x in (single(2, 3, length, 7), single(2, length, 3, 14, seed=1).transpose((0, 2, 1, 3))[..., ::2]):
        assert_selected("rotate", x, np.cos(angles), np.sin(angles))
        assert_same(monkeypatch, lambda x: rotate(x, np.cos(angles), np.sin(angles)), x)


@pytest.mark.parametrize("layout", LAYOUTS)
class TestLayouts:
    """Arrays of different shapes and memory layouts."""

    def test_elementwise(self, monkeypatch, layout):
        x = with_layout(layout, "float32")
        for operation in (gelu, gelu_tanh, relu, silu):
            assert_selected(operation.__name__, x)
            assert_same(monkeypatch, operation, x)
        keep = np.random.default_rng(3).random(x.shape) < 0.7
        assert_selected("dropout", x, keep, keep_probability=0.7)
        assert_same(monkeypatch, lambda x: dropout(x, keep, 0.7), x)
        assert_same(monkeypatch, lambda x: dropout(x, keep.T.copy().T, 0.7), x)

    def test_norms(self, monkeypatch, layout):
        x, weight, bias = with_layout(layout, "float32"), single(14, seed=1)[::2], single(7, seed=2)
        assert_selected("layer_norm", x, weight, bias, epsilon=1e-5)
        assert_selected("rms_norm", x, weight, epsilon=1e-5)
        assert_same(monkeypatch, layer_norm, x, weight, bias)
        assert_same(monkeypatch, lambda x, weight: layer_norm(x, weight, None, epsilon=0.1), x, weight)
        assert_same(monkeypatch, lambda bias: layer_norm(x, weight, bias), bias)
        assert_same(monkeypatch, rms_norm, x, weight)


@pytest.mark.parametrize("odd", [np.inf, -np.inf, np.nan])
def test_dropped_elements_are_zero_even_if_not_finite(odd):
    x, keep = np.asarray([1.0, -2.0, 3.0, odd], "float32"), np.asarray([True, True, False, False])
    assert_selected("dropout", x, keep, keep_probability=0.5)
    np.testing.assert_array_equal(dropout(x, keep, 0.5), [2.0, -4.0, 0.0, 0.0])
    np.testing.assert_array_equal(dropout(x[::-1], keep, 1.0), [odd, 3.0, 0.0, 0.0])
    output, pull = vjp(relu, np.asarray([1.0, odd, -1.0, -1.0], "float32"))
    np.testing.assert_array_equal(output, [1.0, 0.0 if odd < 0 else odd, 0.0, 0.0])
    np.testing.assert_array_equal(pull(x)[0], [1.0, -2.0 if odd > 0 else 0.0, 0.0, 0.0])


def test_gelu_has_the_precision_of_float32():
    x = np.linspace(-16.0, 16.0, 99_991).astype("float32")
    expected, slope = definition(x)
    output, pull = vjp(gelu, x)
    np.testing.assert_allclose(output, expected, rtol=0.0, atol=4e-7)
    np.testing.assert_allclose(pull(np.ones_like(x))[0], slope, rtol=0.0, atol=4e-7)
    tails = (x > -12.0) & (x < -0.01)
    np.testing.assert_allclose(output[tails], expected[tails], rtol=1e-5)


@pytest.mark.parametrize("operation", [gelu_tanh, silu])
def test_logistic_units_have_the_precision_of_float32(operation):
    x = np.concatenate([np.linspace(-20.0, 20.0, 4001), [-1e4, 1e4, 0.0]]).astype(np.float32)
    output, pull = vjp(operation, x)
    expected, expected_pull = vjp(operation, x.astype(np.float64))
    np.testing.assert_allclose(output, expected, rtol=4e-6, atol=1e-7)
    np.testing.assert_allclose(pull(np.ones_like(x))[0], expected_pull(np.ones(x.shape))[0], rtol=4e-6, atol=1e-6)
    special = operation(np.asarray([np.nan, np.inf, -np.inf], np.float32))
    assert np.isnan(special[0])
    np.testing.assert_allclose(special[1:], [np.inf, 0.0], atol=1e-30)


def test_gelu_of_infinity_and_nan():
    x = np.asarray([np.inf, -np.inf, np.nan, 0.0], dtype="float32")
    output, pull = vjp(gelu, x)
    np.testing.assert_array_equal(output, [np.inf, 0.0, np.nan, 0.0])
    np.testing.assert_allclose(pull(np.ones_like(x))[0], [1.0, 0.0, np.nan, 0.5], atol=1e-7)


# --- cross_entropy ------------------------------------------------------------------


@pytest.mark.parametrize("labels", LABELS)
@pytest.mark.parametrize(
    ("label_smoothing", "z_loss", "scale"), [(0.0, 0.0, 1e30), (0.1, 0.01, 1.0), (0.1, 0.0, 300.0)]
)
def test_cross_entropy(monkeypatch, labels, label_smoothing, z_loss, scale):
    logits, ids = np.float32(scale) * single(2, 4, 37), np.asarray(LABELS[labels])
    settings = {"pad_id": 0, "label_smoothing": label_smoothing, "z_loss": z_loss}
    assert_selected("cross_entropy", logits, ids, **settings)
    assert_same(monkeypatch, functools.partial(cross_entropy, labels=ids, **settings), logits)
    outside = np.where(ids == 0, -100, ids)  # a pad_id outside the vocabulary
    assert_same(monkeypatch, lambda x: cross_entropy(x, outside, **settings | {"pad_id": -100}), logits)


def test_cross_entropy_of_strided_and_empty_logits(monkeypatch):
    labels = np.random.default_rng(4).integers(0, 7, 70)
    assert_same(monkeypatch, lambda x: cross_entropy(x, labels.astype("uint8")), single(7, 70).T)
    assert_same(monkeypatch, lambda x: cross_entropy(x, labels[:0].reshape(0, 5)), single(0, 5, 7))


def test_cross_entropy_ignores_padding_and_accepts_infinite_logits():
    logits = single(3, 5)
    logits[0], logits[1, 2] = np.nan, -np.inf
    losses, pull = vjp(lambda x: cross_entropy(x, np.asarray([0, 1, 4]), pad_id=0), logits)
    (gradient,) = pull(np.ones(3, "float32"))
    assert losses[0] == 0.0
    assert not gradient[0].any()
    assert gradient[1, 2] == 0.0
    assert np.isfinite(losses).all()
    assert np.isfinite(gradient).all()


# --- adam ------------------------------------------------------------------


@pytest.mark.parametrize("weight_decay", [0.0, 0.3])
@pytest.mark.parametrize("which", range(4))
def test_twenty_steps_of_adam(monkeypatch, weight_decay, which):
    start = list(memory_orders("float32"))[which]
    settings = {"learning_rate": 0.01, "beta1": 0.9, "beta2": 0.999, "epsilon": 1e-9, "weight_decay": [weight_decay]}
    ends = []
    for mode in ("auto", "portable"):
        monkeypatch.setenv("XFORMER_KERNELS", mode)
        arrays = [start.copy("K"), np.zeros_like(start), np.zeros_like(start)]
        if mode == "auto":
            assert_selected("adam", None, arrays[0], start, *arrays[1:])
        for step in range(1, 21):
            gradient = np.sin(step * start)
            gradient.flags.writeable = False
            grad_scale = np.asarray(0.625, "float32") if weight_decay else None
            (arrays,) = adam([(arrays[0], gradient, *arrays[1:])], step=step, **settings, grad_scale=grad_scale)
        ends.append(arrays)
    for actual, expected in zip(*ends, strict=True):
        assert_close(actual, expected)


# --- supported arrays ------------------------------------------------------------------

FOUR = np.ones((1, 1, 2, 3), "float32")
UNALIGNED = np.zeros(13, "uint8")[1:].view("float32")
UNSUPPORTED = {
    "float64": ("layer_norm", (np.ones((2, 3)), np.ones(3), None), "dtype float64 (the kernel takes float32)"),
    "unaligned": ("gelu", (UNALIGNED,), "an array is not aligned in memory"),
    "adam of strided arrays": ("adam", (None, *(FOUR[..., ::2],) * 4), "arrays are not contiguous"),
    "attention of large heads": (
        "attention",
        (np.ones((1, 1, 2, 257), "float32"),) * 3 + (None,) * 3,
        "head_dim above 256",
    ),
}


@pytest.mark.parametrize("case", UNSUPPORTED)
def test_explain_gives_the_reason(case):
    operation, arrays, reason = UNSUPPORTED[case]
    (line,) = (line for line in ops.explain(operation, *arrays).splitlines() if "numba." in line)
    assert line.startswith(f"  not numba.{operation}: ")
    assert reason in line


def test_the_check_of_kernels_passes(monkeypatch):
    monkeypatch.setenv("XFORMER_CHECK_KERNELS", "1")
    monkeypatch.setattr(kernel_check, "_CHECKED", set())
    x, labels, query = single(6, 8), np.arange(6), single(2, 2, 5, 4)
    for call in (gelu, gelu_tanh, relu, silu, lambda x: dropout(x, x > 0, 0.5), lambda x: layer_norm(x, x[0], x[1])):
        call(x)
    rms_norm(x, x[0])
    cross_entropy(x, labels, label_smoothing=0.1)
    rotate(query, query[0, 0, :, :2], query[0, 1, :, :2])
    attention(query, query, query)
    adam([(x, x, x.copy(), x * x)], learning_rate=0.1, step=1, beta1=0.9, beta2=0.98, epsilon=1e-9)
    linear(single(8, 8), x.T)
    project_heads(np.ones((3, 4, 8), "float32"), (np.ones((8, 8), "float32"), None, 2))
    norms = {"numba.layer_norm", "numba.rms_norm"}
    others = {
        "gelu",
        "gelu_tanh",
        "silu",
        "relu",
        "dropout",
        "rotate",
        "cross_entropy",
        "attention",
        "adam",
        "linear",
        "project_heads",
    }
    assert {f"numba.{name}" for name in others} | norms == kernel_check._CHECKED
