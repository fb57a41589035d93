"""Every NumPy kernel equals the portable definition of its operation: values and all gradients."""

from __future__ import annotations

import functools
import itertools
import os

import numpy as np
import pytest

import xformer as xf
from xformer import kernels, vjp
from xformer.kernels.numpy import attention as numpy_attention
from xformer.ops import attention, cross_entropy, dropout, embedding, layer_norm, linear, relu
from xformer.ops.adam import adam
from xformer.ops.squared_norm import squared_norm

pytestmark = pytest.mark.usefixtures("no_jit")
TOLERANCES = {"float32": 2e-5, "float64": 1e-11}
DTYPES = list(TOLERANCES)


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape)


def both_ways(monkeypatch, function, *arrays):
    """Output and cotangents of `function`, by kernels and by portable code, from arrays that must not be written."""
    for array in arrays:
        array.flags.writeable = False
    found, kernels_in_use = [], os.environ["XFORMER_KERNELS"]
    for mode in (kernels_in_use, "portable"):
        monkeypatch.setenv("XFORMER_KERNELS", mode)
        untraced = function(*arrays)
        output, pull = vjp(function, *arrays)
        assert_close(untraced, output)
        cotangent = normal(*output.shape, seed=9).astype(output.dtype)
        cotangent.flags.writeable = False
        found.append([np.asarray(output), *pull(cotangent)])
    monkeypatch.setenv("XFORMER_KERNELS", kernels_in_use)
    return found


def assert_close(got, wanted):
    assert got.dtype == wanted.dtype
    assert got.shape == wanted.shape
    assert np.isfinite(got).all()
    scale = max(1.0, np.max(np.abs(wanted), initial=0.0))
    np.testing.assert_allclose(got, wanted, rtol=0.0, atol=TOLERANCES[wanted.dtype.name] * scale)


def assert_same(monkeypatch, function, *arrays):
    by_kernel, portable = both_ways(monkeypatch, function, *arrays)
    for got, wanted in zip(by_kernel, portable, strict=True):
        assert_close(got, wanted)


def served_by_kernel(operation, *arrays, **static):
    lines = kernels.explain(operation, *arrays, **static).splitlines()
    assert f"{operation} on numpy: numpy.{operation}" in lines


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("widths", [(6, 6, 6), (8, 2, 2), (5,)])
@pytest.mark.parametrize("rows", [(3, 17), (25, 9), (0, 5), (3, 0)], ids=str)
def test_project_heads(monkeypatch, dtype, biased, widths, rows):
    x = normal(*rows, 4).astype(dtype)
    weights = [normal(4, width, seed=width + place).astype(dtype) for place, width in enumerate(widths)]
    biases = [normal(width, seed=width).astype(dtype) for width in widths] if biased else []
    count = len(weights)

    def function(x, *maps):
        padded = maps if biased else (*maps, *[None] * count)
        heads = xf.ops.project_heads(
            x, *((padded[i], padded[count + i], 1 + (i == 0 and count > 1)) for i in range(count))
        )
        xp = xf.backends.array_namespace(x)
        return xp.concat([xp.reshape(each, (-1,)) for each in heads])

    served_by_kernel("project_heads", x, *weights, *(biases or [None] * count), heads=(1,) * count)
    assert_same(monkeypatch, function, x, *weights, *biases)


@pytest.mark.parametrize("place", [0, 1])
def test_project_heads_with_one_bias_that_is_differentiated(monkeypatch, place):
    x, weights, biases = normal(2, 20, 4), [normal(4, 6, seed=1)] * 2, [normal(6, seed=2), normal(6, seed=3)]

    def function(bias):
        own = [bias if i == place else biases[i] for i in range(2)]
        return xf.ops.project_heads(x, *((weights[i], own[i], 2) for i in range(2)))[place]

    assert_same(monkeypatch, function, biases[place].copy())


def test_project_heads_of_which_one_is_not_used(monkeypatch):
    arrays = normal(2, 20, 4), normal(4, 6, seed=1), normal(4, 6, seed=2)
    assert_same(monkeypatch, lambda x, v, w: xf.ops.project_heads(x, (v, None, 2), (w, None, 3))[1], *arrays)


# --- linear, layer_norm, relu, dropout ------------------------------------------------------------------

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


def laid_out(name, dtype):
    """An array with the strides of LAYOUTS[name] in another dtype."""
    x = LAYOUTS[name]
    if x.base is None:
        return x.astype(dtype)
    whole = x.base.astype(dtype)
    offset = (x.ctypes.data - x.base.ctypes.data) // x.itemsize * whole.itemsize
    strides = tuple(stride // x.itemsize * whole.itemsize for stride in x.strides)
    return np.ndarray(x.shape, dtype, whole, offset, strides)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
class TestLayouts:
    """Kernels that take rows of features, on whatever memory they lie."""

    def test_linear(self, monkeypatch, layout, dtype):
        x, weight, bias = laid_out(layout, dtype), normal(7, 9, seed=1).astype(dtype), normal(9, seed=2).astype(dtype)
        served_by_kernel("linear", x, weight, bias)
        assert_same(monkeypatch, linear, x, weight, bias)
        assert_same(monkeypatch, linear, x, weight)
        assert_same(monkeypatch, linear, x, normal(9, 7, seed=1).astype(dtype).T)

    def test_layer_norm(self, monkeypatch, layout, dtype):
        x, weight, bias = laid_out(layout, dtype), normal(7, seed=1).astype(dtype), normal(7, seed=2).astype(dtype)
        served_by_kernel("layer_norm", x, weight, bias, epsilon=1e-5)
        assert_same(monkeypatch, layer_norm, x, weight, bias)
        assert_same(monkeypatch, lambda x, weight: layer_norm(x, weight, None, epsilon=0.1), x, weight)

    def test_relu(self, monkeypatch, layout, dtype):
        served_by_kernel("relu", laid_out(layout, dtype))
        assert_same(monkeypatch, relu, laid_out(layout, dtype))
        assert_same(monkeypatch, relu, np.zeros((2, 3), dtype))

    def test_dropout(self, monkeypatch, layout, dtype):
        x = laid_out(layout, dtype)
        keep = np.random.default_rng(3).random(x.shape) < 0.7
        served_by_kernel("dropout", x, keep, keep_probability=0.7)
        assert_same(monkeypatch, lambda x: dropout(x, keep, 0.7), x)
        assert_same(monkeypatch, lambda x: dropout(x, keep.T.copy().T, 0.7), x)

    def test_squared_norm(self, monkeypatch, layout, dtype):
        served_by_kernel("squared_norm", laid_out(layout, dtype))
        assert_same(monkeypatch, squared_norm, laid_out(layout, dtype))
        assert_same(monkeypatch, squared_norm, laid_out(layout, dtype), normal(3).astype(dtype))


@pytest.mark.parametrize("dtype", [*DTYPES, ">f4"])
@pytest.mark.parametrize("odd", [np.inf, -np.inf, np.nan])
def test_what_is_not_chosen_is_zero_whatever_stands_there(dtype, odd):
    x, keep = np.asarray([1.0, -2.0, 3.0, odd], dtype), np.asarray([True, True, False, False])
    served_by_kernel("dropout", x, keep, keep_probability=0.5)
    np.testing.assert_array_equal(dropout(x, keep, 0.5), [2.0, -4.0, 0.0, 0.0])
    _, pull = vjp(relu, np.asarray([1.0, 1.0, -1.0, -1.0], dtype))
    np.testing.assert_array_equal(pull(x)[0], [1.0, -2.0, 0.0, 0.0])
    # What is chosen stays what it is.
    np.testing.assert_array_equal(dropout(x[::-1], keep, 1.0), [odd, 3.0, 0.0, 0.0])


def test_gradients_of_only_some_inputs(monkeypatch):
    x, weight, bias = normal(3, 5, 7), normal(7, 9, seed=1), normal(9, seed=2)
    assert_same(monkeypatch, lambda x: linear(x, weight, bias), x)
    assert_same(monkeypatch, lambda weight: linear(x, weight, bias), weight)
    assert_same(monkeypatch, lambda bias: linear(x, weight, bias), bias)
    assert_same(monkeypatch, lambda scale: layer_norm(x, scale, bias[:7]), weight[:, 0].copy())
    assert_same(monkeypatch, lambda x: layer_norm(x, weight[:, 0], bias[:7]), x)


# --- embedding and cross_entropy ------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "ids", [[[3, 1, 3], [0, 3, 10]], [[5]], [[10, 10, 10, 10]], np.zeros((0, 3)), np.zeros((2, 0))]
)
@pytest.mark.parametrize("id_dtype", ["int64", "int32", "uint64"])
def test_embedding(monkeypatch, dtype, ids, id_dtype):
    weight, ids = normal(11, 5).astype(dtype), np.asarray(ids, dtype=id_dtype)
    served_by_kernel("embedding", weight, ids)
    assert_same(monkeypatch, lambda weight: embedding(weight, ids), weight)


LABELS = {
    "some padding": [[3, 0, 12, 5], [1, 7, 0, 0]],
    "all padding": [[0, 0, 0, 0], [0, 0, 0, 0]],
    "no padding": [[3, 1, 12, 5], [1, 7, 1, 2]],
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("labels", LABELS)
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
@pytest.mark.parametrize("z_loss", [0.0, 0.01])
@pytest.mark.parametrize("scale", [1.0, 300.0], ids=["usual", "would overflow"])
def test_cross_entropy(monkeypatch, dtype, labels, label_smoothing, z_loss, scale):
    logits, ids = (scale * normal(2, 4, 13)).astype(dtype), np.asarray(LABELS[labels])
    settings = {"label_smoothing": label_smoothing, "z_loss": z_loss}
    served_by_kernel("cross_entropy", logits, ids, pad_id=0, **settings)
    loss = functools.partial(cross_entropy, labels=ids, **settings)
    assert_same(monkeypatch, loss, logits)
    # A pad_id that is no token.
    outside = np.where(ids == 0, -100, ids)
    assert_same(monkeypatch, lambda x: cross_entropy(x, outside, pad_id=-100), logits)


@pytest.mark.parametrize("dtype", DTYPES)
def test_cross_entropy_in_several_blocks_and_of_nothing(monkeypatch, dtype):
    logits = normal(70, 3001).astype(dtype)
    labels = np.random.default_rng(4).integers(0, 3001, 70)
    assert_same(monkeypatch, lambda x: cross_entropy(x, labels, label_smoothing=0.1, z_loss=0.1), logits)
    assert_same(monkeypatch, lambda x: cross_entropy(x, labels[:0].reshape(0, 5)), normal(0, 5, 7).astype(dtype))
    columns = normal(7, 70).astype(dtype).T
    assert_same(monkeypatch, lambda x: cross_entropy(x, labels % 7), columns)


# --- attention ------------------------------------------------------------------

# Not 5 features: OpenBLAS 0.3.31 with AVX-512 multiplies (m, 5) by a vector with lanes that nobody wrote, and what lies
# there may raise the flag of an invalid value, though the product is right.
BATCH, HEADS, HEAD_DIM = 3, 2, 7
LENGTHS = [(6, 6), (4, 7), (7, 4), (1, 6), (1, 1)]  # queries, keys
MASKS = ["none", "padding", "full", "queries and keys", "nothing for some", "nothing for a sentence"]


def make_mask(kind, queries, keys):
    rng = np.random.default_rng(5)
    if kind == "none":
        return None
    if kind in ("padding", "nothing for a sentence"):
        lengths = np.asarray([keys, max(1, keys - 2), 0 if kind == "nothing for a sentence" else 1])
        return (np.arange(keys) < lengths[:, None])[:, None, None]
    if kind == "queries and keys":
        return rng.random((queries, keys)) < 0.6
    mask = rng.random((BATCH, HEADS, queries, keys)) < 0.6
    if kind == "nothing for some":
        mask[1, :, queries // 2] = False
    return mask


def heads(length, features, dtype, seed):
    """(batch, heads, length, features), laid out as a projection leaves it."""
    return normal(BATCH, length, HEADS, features, seed=seed).astype(dtype).transpose(0, 2, 1, 3)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("causal", "drop"), list(itertools.product([False, True], [False, True])))
def test_attention(monkeypatch, dtype, lengths, mask, causal, drop):
    queries, keys = lengths
    arrays = heads(queries, HEAD_DIM, dtype, 1), heads(keys, HEAD_DIM, dtype, 2), heads(keys, 4, dtype, 3)
    allowed = make_mask(mask, queries, keys)
    keep = np.random.default_rng(6).random((BATCH, HEADS, queries, keys)) < 0.8 if drop else None
    static = {"causal": causal, "keep_probability": 0.8 if drop else 1.0}
    served_by_kernel("attention", *arrays, allowed, None, keep, scale=0.5, **static)
    attend = functools.partial(attention, mask=allowed, keep=keep, **static)
    assert_same(monkeypatch, attend, *arrays)
    monkeypatch.setattr(numpy_attention, "_TILE_SCORES", 1)  # one head of one sentence at a time
    assert_same(monkeypatch, attend, *arrays)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(BATCH, HEADS, 4, 6), (HEADS, 4, 6), (1, HEADS, 1, 6), (4, 1)], ids=str)
@pytest.mark.parametrize("mask", ["none", "padding", "nothing for some"])
def test_attention_with_a_bias(monkeypatch, dtype, shape, mask):
    arrays = heads(4, HEAD_DIM, dtype, 1), heads(6, HEAD_DIM, dtype, 2), heads(6, 4, dtype, 3)
    bias, allowed = normal(*shape, seed=4).astype(dtype), make_mask(mask, 4, 6)
    served_by_kernel("attention", *arrays, allowed, bias, None, scale=0.5, causal=True, keep_probability=1.0)
    for causal in (False, True):
        attend = functools.partial(attention, mask=allowed, causal=causal)
        assert_same(monkeypatch, lambda q, k, v, b, f=attend: f(q, k, v, bias=b), *arrays, bias)
    one = arrays[0][:, :, :1]
    if shape[-2] == 1:
        assert_same(monkeypatch, lambda q, k, v, b: attention(q, k, v, bias=b), one, *arrays[1:], bias)


@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_on_other_memory(monkeypatch, dtype):
    query, key, value = (normal(BATCH, HEADS, 6, HEAD_DIM, seed=i).astype(dtype) for i in range(3))
    assert_same(monkeypatch, attention, query, key, value)
    assert_same(monkeypatch, attention, query[..., ::-1], key[:, :, ::2], value[:, :, ::2])
    assert_same(monkeypatch, attention, query[:0], key[:0], value[:0])
    assert_same(monkeypatch, lambda q, k, v: attention(q, k, v, scale=3.0, causal=True), 40.0 * query, key, value)


@pytest.mark.parametrize(
    ("batch", "heads", "scores"), [(32, 8, 600), (3, 8, 512 * 512), (1, 1, 10**7), (5, 3, 40_000), (2, 2, 0), (0, 4, 9)]
)
def test_tiles_cover_every_head_once(batch, heads, scores):
    seen = np.zeros((batch, heads), dtype=int)
    for rows, columns in numpy_attention._tiles(batch, heads, scores):
        seen[rows, columns] += 1
        size = seen[rows, columns].size * scores
        assert size <= 2 * numpy_attention._TILE_SCORES or seen[rows, columns].size == 1
    assert (seen == 1).all()


# --- optimizer ------------------------------------------------------------------


def memory_orders(dtype):
    yield normal(7, 5).astype(dtype)
    yield np.asfortranarray(normal(7, 5).astype(dtype))
    yield normal(100_003).astype(dtype)
    yield normal(0, 5).astype(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weight_decay", [0.0, 0.3])
@pytest.mark.parametrize("which", range(4))
def test_adam_stays_equal_for_twenty_steps(monkeypatch, dtype, weight_decay, which):
    start = list(memory_orders(dtype))[which]
    zeros = np.zeros_like(start)
    served_by_kernel("adam", None, start.copy("K"), start, zeros.copy("K"), zeros.copy("K"), keep=(1.0,))
    ends = []
    for mode in (os.environ["XFORMER_KERNELS"], "portable"):
        monkeypatch.setenv("XFORMER_KERNELS", mode)
        arrays = (start.copy("K"), zeros.copy("K"), zeros.copy("K"))
        for step in range(1, 21):
            gradient = np.sin(step * start)
            gradient.flags.writeable = False
            (arrays,) = adam(
                [(arrays[0], gradient, *arrays[1:])],
                learning_rate=0.01,
                step=step,
                beta1=0.9,
                beta2=0.98,
                epsilon=1e-9,
                weight_decay=[weight_decay],
                factor=np.asarray(0.625) if weight_decay else None,
            )
        ends.append(arrays)
    for got, wanted in zip(*ends, strict=True):
        assert got.dtype == wanted.dtype
        np.testing.assert_allclose(got, wanted, rtol=0.0, atol=TOLERANCES[dtype])


def test_adam_works_in_place_only_where_it_may():
    parameter, zeros = normal(4, 3), np.zeros((4, 3))
    parameter.flags.writeable = False
    assert "read-only" in kernels.explain("adam", None, parameter, zeros, zeros.copy(), zeros.copy())
    mixed = np.asfortranarray(zeros)
    assert "memory order" in kernels.explain("adam", None, normal(4, 3), zeros, mixed, zeros.copy())
    every_other = np.zeros((4, 6))[:, ::2]
    assert "contiguous" in kernels.explain("adam", None, every_other, zeros, zeros.copy(), zeros.copy())


def test_adam_takes_a_gradient_of_another_memory_order(monkeypatch):
    parameter, gradient = normal(4, 3), normal(4, 3, seed=1)
    ends = []
    for given in (gradient, np.asfortranarray(gradient)):
        moments = np.zeros((4, 3)), np.zeros((4, 3))
        served_by_kernel("adam", None, parameter.copy(), given, *moments, keep=(1.0,))
        row = parameter.copy(), given, *moments
        ends.append(adam([row], learning_rate=0.1, step=1, beta1=0.9, beta2=0.98, epsilon=1e-9)[0])
    np.testing.assert_array_equal(ends[0], ends[1])


# --- what kernels leave to the portable code ------------------------------------------------------------------

HALF, SINGLE = np.ones((2, 3), "float16"), np.ones((2, 3), "float32")
IDS = np.zeros(2, dtype=int)
FOUR = np.ones((1, 1, 2, 3), "float32")
ATTENTION = {"causal": False, "scale": 1.0, "keep_probability": 1.0}
LEFT = {
    "linear mixed": ("linear", (SINGLE, np.ones((3, 2)), None), {}, "float32 and float64 are mixed"),
    "layer_norm float16": ("layer_norm", (HALF, HALF[0], None), {"epsilon": 1e-5}, "dtype float16"),
    "relu float16": ("relu", (HALF,), {}, "dtype float16"),
    "relu integers": ("relu", (HALF.astype(complex),), {}, "dtype complex128"),
    "dropout float16": ("dropout", (HALF, HALF > 0), {"keep_probability": 0.5}, "dtype float16"),
    "dropout broadcast": ("dropout", (SINGLE, SINGLE[:1] > 0), {"keep_probability": 0.5}, "keep is broadcast"),
    "embedding float16": ("embedding", (HALF, IDS), {}, "dtype float16"),
    "cross_entropy float16": ("cross_entropy", (HALF, IDS), {}, "dtype float16"),
    "squared_norm float16": ("squared_norm", (HALF,), {}, "dtype float16"),
    "adam float16": ("adam", (None, HALF.copy(), HALF, SINGLE.copy(), SINGLE.copy()), {}, "dtype float16"),
    "attention of three axes": ("attention", (FOUR[0],) * 3 + (None,) * 3, ATTENTION, "not (batch, heads,"),
    "attention broadcast": ("attention", (np.ones((2, 1, 2, 3), "float32"), FOUR, FOUR, None, None, None), ATTENTION,
                            "batch or heads are broadcast"),
    "attention bias": ("attention", (FOUR,) * 3 + (None, np.ones((2, 2)), None), ATTENTION, "bias is of another dtype"),
}  # fmt: skip


@pytest.mark.parametrize("case", LEFT)
def test_explain_says_why_not(case):
    operation, arrays, static, reason = LEFT[case]
    first, *lines = kernels.explain(operation, *arrays, **static).splitlines()
    (line,) = (line for line in lines if line.startswith(f"  not numpy.{operation}: "))
    assert reason in line
    assert first == f"{operation} on numpy: portable definition"


def test_what_is_left_to_the_portable_code_still_works():
    half = normal(2, 3).astype("float16")
    assert linear(half, half.T).dtype == np.float16
    assert attention(*(normal(5, 3, seed=i) for i in range(3))).shape == (5, 3)
    wide = attention(normal(2, 1, 4, 3), *(normal(1, 2, 6, 3, seed=i) for i in (1, 2)))
    assert wide.shape == (2, 2, 4, 3)
    spread = dropout(normal(2, 3), np.asarray([[True, False, True]]), 0.5)
    assert spread.shape == (2, 3)
    assert (spread[:, 1] == 0).all()
