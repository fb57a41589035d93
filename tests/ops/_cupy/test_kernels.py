"""The CuPy kernels of operations equal the portable definitions, for arrays of any shape, dtype and memory layout."""

from __future__ import annotations

import functools
import math

import ml_dtypes
import numpy as np
import pytest

from tests.conftest import assert_close
from tests.ops._cupy.cuda_cases import DTYPES, LAYOUTS, normal
from tests.ops._cupy.cuda_on_host import CASTS
from tests.ops.cases import SHAPES, TABLE, features, joined_add_norm, maps, random_bools
from tests.reference import for_each, raises_line
from xformer import ops, vjp
from xformer.backends import array_namespace, dtype_name, resolve, to_host
from xformer.errors import ShapeError
from xformer.kernels.cupy import optimizer, rows
from xformer.kernels.cupy.elementwise import add
from xformer.kernels.cupy.launch import grid_for_shared_rows
from xformer.ops import (
    cast,
    cross_entropy,
    dropout,
    embedding,
    gelu,
    layer_norm,
    linear,
    project_heads,
    relu,
    rms_norm,
    rotate,
    softmax,
    squared_norm,
    top_k,
)
from xformer.ops.activations import ACTIVATIONS, gated
from xformer.ops.norms import add_norm
from xformer.ops.operation import OPERATIONS

SPECIAL = [np.nan, np.inf, -np.inf]


@pytest.mark.parametrize("operation", TABLE)
@for_each("dtype", DTYPES)
def test_values_and_derivatives(cuda, operation, dtype):
    function, options, *hosts = TABLE[operation][0]
    arrays = [cuda.array(host, dtype) for host in hosts]
    if operation == "project_heads":
        x, *weights = arrays
        arrays = [x, *(each for pair in zip(weights[:3], weights[3:], strict=True) for each in pair)]
        options = {"heads": (2, 1, 2)}
    assert cuda.served(operation, *arrays, **options)
    for function, options, *hosts in TABLE[operation]:
        cuda.agree(functools.partial(function, **options), *hosts, dtype=dtype)


@for_each("dtype", DTYPES)
def test_arrays_that_take_several_launches(cuda, monkeypatch, dtype):
    """Ids that stand in one piece, in two, and in many; 12 features are one chunk and a half of 16 bytes."""
    monkeypatch.setattr(rows, "_SEGMENT", 7)
    monkeypatch.setattr(rows, "_SUMMING_BLOCKS", 3)
    monkeypatch.setattr(rows, "_SUMMED_THREADS", 1)
    monkeypatch.setitem(optimizer.MAX_ITEMS, 1, 2)
    for function, options, *hosts in TABLE["embedding"][::2] + TABLE["squared_norm"] + TABLE["add_norm"][-6::2]:
        cuda.agree(functools.partial(function, **options), *hosts, dtype=dtype)


@for_each("dtype", DTYPES)
@for_each("name", ACTIVATIONS)
def test_activations_and_gated_units(cuda, name, dtype):
    special = np.asarray([np.nan, np.inf, -np.inf, -0.0, 0.0, -90.0, 90.0, -6e4, 6e4, -3.0])
    for shape in SHAPES:
        cuda.agree(ACTIVATIONS[name], 3.0 * normal(*shape), dtype=dtype)
        cuda.agree(lambda x, y: gated(x, y, name), 3.0 * normal(*shape), normal(*shape, seed=1), dtype=dtype)
    g, gate, up = (cuda.array(each, dtype) for each in (np.full(10, 0.5), special, np.full(10, 2.0)))
    output, pull = vjp(lambda x, y: gated(x, y, name), gate, up)
    got = output, *pull(g), ACTIVATIONS[name](gate)
    with np.errstate(all="ignore"):
        x = to_host(gate).astype("float64")
        kernel = OPERATIONS[name].definition
        y, residuals = kernel.forward(x, save=True)
        (slope,) = kernel.vjp(np.ones(10), residuals, (True,))
        expected = [each.astype(to_host(output).dtype) for each in (2.0 * y, slope, 0.5 * y, y)]
    for actual, correct in zip(got, expected, strict=True):
        np.testing.assert_allclose(*(np.asarray(to_host(each), float) for each in (actual, correct)), 1e-2, 1e-7)


@for_each(
    "shape", [(2, 3, 5, 16, 8), (2, 3, 5, 16, 4), (1, 2, 7, 6, 3), (2, 1, 4, 20, 7), (0, 2, 3, 8, 4), (1, 9, 1, 64, 32)]
)
@for_each("dtype", DTYPES)
def test_rotation_in_both_orders_of_heads_and_rows(cuda, dtype, shape):
    batch, heads, length, size, half = shape
    angles = np.random.default_rng(0).uniform(-3.0, 3.0, (length, half))

    def rotated(x):
        turned = rotate(x, *(cuda.array(each, dtype_name(x.dtype)) for each in (np.cos(angles), np.sin(angles))))
        assert turned.shape == x.shape
        return turned

    tolerance = {"float16": 8e-3, "bfloat16": 6e-2}.get(dtype)
    rows = normal(batch, length, heads, size)
    for x in (rows.reshape(batch, heads, length, size), rows.reshape(batch * heads, length, size)):
        cuda.agree(rotated, x, dtype=dtype, tolerance=tolerance)
    for view in (np.s_[:], np.s_[:, ::-1], np.s_[..., ::-1]):
        cuda.agree(
            lambda x, view=view: rotated(array_namespace(x).permute_dims(x[view], (0, 2, 1, 3))),
            rows,
            dtype=dtype,
            tolerance=tolerance,
        )


ADDING = {"epsilon": 1e-5, "centered": True}
ON_LAYOUTS = [
    (lambda gate, up: gated(gate, up, "silu"), normal(6, 16), normal(6, 16, seed=1)),
    (lambda up, gate: gated(gate, up, "silu"), normal(6, 16), normal(6, 16, seed=1)),
    *((relu, normal(6, 16)), (gelu, normal(6, 16)), (softmax, normal(5, 16))),
    (lambda x, ids: cross_entropy(x, ids), normal(5, 16), np.asarray([1, 0, 15, 3, 3])),
    (layer_norm, normal(6, 16), normal(16, seed=1), normal(16, seed=2)),
    (lambda weight, x: layer_norm(x, weight, None), normal(16, seed=1), normal(6, 16)),
    (
        lambda y, *rest: add_norm(*rest[:1], y, *rest[1:], **ADDING, keep_sum=False),
        normal(6, 16),
        *features((6, 16), 2),
    ),
    (lambda *all: add_norm(*all, **ADDING, keep_sum=False), *[normal(6, 16)] * 2, *features((6, 16), 2)[1:]),
    (linear, *maps((6, 16), 8)),
    (lambda weight, x: linear(x, weight), normal(16, 8, seed=1), normal(6, 16)),
    (lambda bias, x, weight: linear(x, weight, bias), normal(8), *maps((6, 16), 8)[:2]),
]


@for_each("layout", LAYOUTS)
@for_each("dtype", ["float32", "bfloat16"])
def test_layouts(cuda, layout, dtype):
    for function, *hosts in ON_LAYOUTS:
        cuda.agree(function, *hosts, dtype=dtype, layout=LAYOUTS[layout])


@for_each("dtype", ["float16", "bfloat16"])
def test_float32_beside_16_bits(cuda, dtype):
    x, weight, bias = features((9, 24), 2)
    cuda.agree(layer_norm, x, weight, bias, dtype=(dtype, "float32", "float32"))
    cuda.agree(rms_norm, x, weight, dtype=(dtype, "float32"))
    cuda.agree(
        functools.partial(joined_add_norm, **ADDING, keep_sum=True),
        x,
        x,
        weight,
        bias,
        dtype=(dtype, dtype, "float32", "float32"),
    )
    cuda.agree(squared_norm, normal(5, 3), normal(70), normal(4), dtype=("bfloat16", "float32", "float16"))
    output, pull = vjp(lambda x: cross_entropy(x, cuda.array([1, 2])), cuda.array(normal(2, 5), dtype))
    assert (str(output.dtype), str(pull(cuda.xp.ones_like(output))[0].dtype)) == ("float32", dtype)


REASONS = [
    ("rms_norm", {"epsilon": 1e-5}, [((2, 3), "float32"), ((3,), "float16")], "parameters of dtype float16"),
    ("rms_norm", {"epsilon": 1e-5}, [((2, 3), "float32"), ((3,), "float64")], "parameters of dtype float64"),
    ("squared_norm", {}, [((3,), "float64"), ((3,), "float32")], "mixed dtypes: float64 and others"),
    ("linear", {}, [((2, 3), "float32"), ((3, 4), "float16"), None], "mixed dtypes (the kernel takes float16 or"),
    ("cast", {"dtype": "float16"}, [((3,), "float64")], "float64 would be rounded"),
]  # fmt: skip


def test_explain_gives_the_reason(cuda):
    for operation, options, arrays, reason in REASONS:
        arrays = [None if array is None else cuda.array(np.ones(array[0]), array[1]) for array in arrays]
        assert f"  not cupy.{operation}: {reason}" in ops.explain(operation, *arrays, **options)
    table = cuda.array(normal(3, 5)).T
    reason = "  not cupy.embedding: the weight is not contiguous"
    assert reason in ops.explain("embedding", table, cuda.array([1]), scale=1.0)


WRONG = [
    ("rms_norm", {"epsilon": 1e-5}, [(2, 3), (1,)], r"rms_norm got x of shape \(2, 3\) and weight of shape \(1,\)"),
    ("linear", {}, [(2, 3), (3, 2), (1,)], r"linear got weight of shape \(3, 2\) and bias of shape \(1,\)"),
    ("project_heads", {"heads": (1,)}, [(1, 2, 3), (3, 2), (1,)], r"weight\[0\] of shape \(3, 2\) and bias\[0\] of sh"),
    ("dropout", {"keep_probability": 0.5}, [(2, 3), "bool 2 1"], r"x of shape \(2, 3\) and mask of shape \(2, 1\)"),
    ("dropout", {"keep_probability": 0.5}, [(2, 3), "int64 2 3"], "dropout got mask of dtype int64; expected bool"),
    ("softmax", {}, [(1, 3), "bool 4 3"], r"softmax got mask of shape \(4, 3\); expected a shape that broadcasts to"),
    ("softmax", {}, [(1, 3), "int64 1 3"], "softmax got mask of dtype int64; expected bool"),
    ("squared_norm", {}, ["int64 3"], r"squared_norm got x\[0\] of dtype int64; expected a floating dtype"),
]


def test_arrays_that_do_not_fit(cuda):
    for operation, options, arrays, match in WRONG:
        typed = [(each.split()[0], map(int, each.split()[1:])) if isinstance(each, str) else each for each in arrays]
        made = [np.ones(tuple(each[1]), each[0]) if isinstance(each[0], str) else np.ones(each) for each in typed]
        with raises_line(ShapeError, match):
            ops.explain(operation, *map(cuda.array, made), **options)


# --- values -----------------------------------------------------------------------------------------------------------


def test_more_than_2_to_the_31_elements(cuda):
    """On a GPU; on the host a few."""
    x = -cuda.xp.ones(100 if cuda.launcher else 2**31 + 100, dtype=cuda.xp.dtype_named("bfloat16"))
    x[-3] = 2.0
    y, pull = vjp(relu, x)
    for got in (y, pull(x)[0]):
        np.testing.assert_array_equal(to_host(got[-4:]), [0.0, 2.0, 0.0, 0.0])
        assert not bool(cuda.xp.any(got[:-4] != 0))
    count, n = (3, 64) if cuda.launcher else (2**16 + 1, 2**15)
    logits = cuda.xp.zeros((count, n), dtype=cuda.xp.dtype_named("bfloat16"))
    logits[-1, -1] = 5.0
    losses, pull = vjp(lambda logits: cross_entropy(logits, cuda.xp.full(count, n - 1)), logits)
    np.testing.assert_allclose(to_host(losses[:-1]), math.log(n), rtol=1e-5)
    np.testing.assert_allclose(to_host(losses[-1]), math.log(n - 1 + math.exp(5.0)) - 5.0, rtol=1e-5)
    (g,) = pull(cuda.xp.ones_like(losses))
    probability = math.exp(5.0) / (n - 1 + math.exp(5.0))
    np.testing.assert_allclose(to_host(g[:, -1]), [*[1.0 / n - 1.0] * (count - 1), probability - 1.0], rtol=0.01)


@for_each("dtype", DTYPES)
def test_infinities_and_nan(cuda, dtype):
    x = cuda.array([1.0, -2.0, np.nan, np.inf, -np.inf, -0.0], dtype)
    np.testing.assert_array_equal(to_host(relu(x)), [1.0, 0.0, np.nan, np.inf, 0.0, 0.0])
    np.testing.assert_array_equal(to_host(gelu(x))[2:], [np.nan, np.inf, 0.0, 0.0])
    (slope,) = vjp(gelu, x)[1](cuda.xp.ones_like(x))
    np.testing.assert_array_equal(to_host(slope)[2:], [np.nan, 1.0, 0.0, 0.5])
    keep = cuda.array([True, True, False, False, True, False])
    np.testing.assert_array_equal(to_host(dropout(x, keep, 0.5)), [2.0, -4.0, 0.0, 0.0, -np.inf, 0.0])
    for n, value in ((8, np.nan), (9, np.inf), (8, -np.inf)):
        rows = normal(3, n)
        rows[1, 2] = value
        y = to_host(layer_norm(cuda.array(rows, dtype), *(cuda.array(np.ones(n), dtype) for _ in range(2))))
        assert np.isnan(y.astype(float)).any(axis=-1).tolist() == [False, True, False]


def test_padding_may_hold_anything_and_a_logit_of_minus_infinity_has_no_probability(cuda):
    logits = normal(3, 5)
    logits[0], logits[1, 2] = np.nan, -np.inf
    loss, pull = vjp(lambda x: cross_entropy(x, cuda.array([0, 1, 3]), pad_id=0), cuda.array(logits, "float32"))
    (dlogits,) = map(to_host, pull(cuda.xp.ones_like(loss)))
    assert to_host(loss)[0] == dlogits[1, 2] == 0
    assert not dlogits[0].any()
    assert np.isfinite(to_host(loss)).all()
    assert np.isfinite(dlogits).all()


@for_each("dtype", ["float16", "bfloat16"])
def test_gelu_of_all_numbers_of_16_bits(cuda, dtype):
    """Rounded once, down to where the result is -1e-6; the derivative is near 0.5 and 1, or small."""
    with np.errstate(invalid="ignore"):  # of NaN
        x = np.arange(2**16, dtype=np.uint16).view(resolve("numpy").dtype_named(dtype)).astype(float)
    x = x[(x > -5.5) & (x < 1e4)]
    tail = np.asarray([math.erfc(-value / math.sqrt(2.0)) / 2.0 for value in x])
    got, pull = vjp(gelu, cuda.array(x, dtype))
    rounding = 2.0 ** (-8 if dtype == "bfloat16" else -10)
    np.testing.assert_allclose(to_host(got).astype(float), x * tail, rtol=rounding, atol=1e-7)
    slope = to_host(pull(cuda.xp.ones_like(got))[0]).astype(float)
    expected = tail + x * np.exp(-x * x / 2.0) / math.sqrt(2.0 * math.pi)
    np.testing.assert_allclose(slope, expected, rtol=rounding, atol=1e-6)


@for_each("dtype", DTYPES)
def test_the_gradient_of_losses_is_computed_with_them(cuda_host, dtype):
    """Not in float16, whose losses are scaled so that the gradient does not underflow."""
    logits, labels = cuda_host.array(normal(3, 40), dtype), cuda_host.array([7, 0, 39])
    settings = {"pad_id": 0, "label_smoothing": 0.1, "z_loss": 0.01}
    losses, residuals = kernel("cross_entropy").forward(logits, labels, save=True, **settings)
    dlogits, _ = kernel("cross_entropy").vjp(np.ones_like(losses), residuals, (True, False), **settings)
    wide = "float64" if dtype == "float64" else "float32"
    last = f"softmax.cross_entropy<{dtype}>" if dtype == "float16" else f"columns.scale_rows<{dtype}, {wide}, {dtype}>"
    assert cuda_host.launcher.launched[-2:] == [f"softmax.cross_entropy<{dtype}>", last]
    assert np.shares_memory(dlogits, residuals[0] if dtype == "float16" else residuals) == (dtype != "float16")


@for_each("label_smoothing", [0.0, 0.1])
def test_an_offset_of_all_logits_changes_nothing(cuda, label_smoothing):
    logits = np.round(8.0 * normal(3, 300)) / 8.0  # exact in float32 with the offset, too
    settings = {"labels": cuda.array([7, 0, 299]), "label_smoothing": label_smoothing}
    expected = to_host(cross_entropy(cuda.array(logits, "float64"), **settings))
    losses = to_host(cross_entropy(cuda.array(logits + 1e6, "float32"), **settings))
    np.testing.assert_allclose(losses, expected, rtol=2e-6)


@for_each("dtype", DTYPES)
def test_numbers_at_the_limits_of_a_dtype(cuda, dtype):
    """A mask that is added may be the lowest number; the squares of large rows are beyond the range of float32."""
    lowest = float(ml_dtypes.finfo(cuda.xp.dtype_named(dtype)).min)
    scores = np.full((3, 16), lowest)
    scores[1, 3], scores[2, :8] = -lowest, 1.0
    expected = np.stack([np.full(16, 1 / 16), np.arange(16) == 3, np.where(np.arange(16) < 8, 1 / 8, 0.0)])
    np.testing.assert_allclose(to_host(softmax(cuda.array(scores, dtype))).astype(float), expected, rtol=1e-6)
    size = {"float16": 60000.0, "bfloat16": 1e30, "float32": 1e30, "float64": 1e200}[dtype]
    tolerance = {"float32": 1e-5, "float64": 1e-12}.get(dtype, 0.05)
    for n, norm in ((33, layer_norm), (40, rms_norm), (40, layer_norm), (33, rms_norm)):
        x, ones = normal(4, n), [cuda.array(np.ones(n), dtype)] * (1 if norm is rms_norm else 2)
        x = x / np.abs(x).max()
        y, pull = vjp(norm, cuda.array(size * x, dtype), *ones)
        small, small_pull = vjp(lambda x, n=norm, ones=ones: n(x, *ones, epsilon=0.0), cuda.array(x, dtype))
        assert_close(y, small, tolerance=tolerance)
        g = cuda.array(normal(4, n, seed=3), dtype)
        if dtype != "float16":  # whose derivative there is below its smallest number
            got, correct = to_host(pull(g)[0]).astype(float) * size, to_host(small_pull(g)[0]).astype(float)
            np.testing.assert_allclose(got, correct, rtol=0, atol=tolerance * np.abs(correct).max())


def test_rows_that_just_fit_into_registers_and_longer_ones(cuda):
    for n in (16384, 16392):
        cuda.agree(layer_norm, *features((2, n), 2), dtype="bfloat16")
        add = functools.partial(add_norm, **ADDING, keep_sum=False)
        cuda.agree(add, normal(2, n), *features((2, n), 2), dtype="bfloat16")


# --- masks of softmax and dropout -------------------------------------------------------------------------------------


def softmax_by_hand(x, mask):
    powers = np.where(mask, np.exp(x), 0.0)
    total = powers.sum(axis=-1, keepdims=True)
    return np.divide(powers, total, out=np.zeros_like(powers), where=total > 0)


@for_each("dtype", DTYPES)
@for_each("view", [np.s_[:, 1:65], np.s_[:, :128:2], np.s_[:, 64:0:-1], np.s_[::2, 8:72], np.s_[:1, :64]])
def test_views_of_masks(cuda, dtype, view):
    """Those of which vectors are aligned, and those of which they are not."""
    scores, mask = normal(3, 64), cuda.array(random_bools(6, 144))[:, :128]
    mask = mask[view][:3]
    got = to_host(softmax(cuda.array(scores, dtype), mask)).astype(float)
    tolerance = {"float32": 1e-6, "float64": 1e-12}.get(dtype, 1e-2)
    np.testing.assert_allclose(got, softmax_by_hand(scores, to_host(mask)), atol=tolerance)


def test_masks_with_other_axes_and_strides(cuda):
    for shape, mask in (((2, 2, 2, 2, 2, 3), random_bools(2, 1, 2, 1, 2, 1)), ((2, 3), random_bools(3, 2).T)):
        x = normal(*shape)
        np.testing.assert_allclose(to_host(softmax(cuda.array(x), cuda.array(mask))), softmax_by_hand(x, mask))
        whole = np.broadcast_to(mask, shape)
        for keep in (mask, np.asfortranarray(whole)):
            np.testing.assert_array_equal(
                to_host(dropout(cuda.array(x), cuda.array(keep), 0.5)), np.where(whole, 2.0 * x, 0.0)
            )


@for_each("dtype", DTYPES)
@for_each("n", [1, 4, 33, 64, 1024])
def test_short_rows_share_blocks(cuda, dtype, n):
    """Blocks have more rows than are left; a row with NaN does not change its neighbors."""
    scores, mask = normal(37, n), np.random.default_rng(5).random((37, n)) < 0.8
    cuda.agree(softmax, scores, mask, dtype=dtype)
    scores[5, 0], scores[7] = np.nan, -np.inf
    y, pull = vjp(softmax, cuda.array(scores, dtype))
    (dx,) = pull(cuda.array(np.ones((37, n)), dtype))
    assert not to_host(y)[7].any()
    for result in (y, dx):
        np.testing.assert_array_equal(np.isnan(to_host(result).astype("float64")).any(axis=-1), np.arange(37) == 5)


def test_grids_of_short_rows():
    grids = {1: (3, 128, 1), 4: (3, 128, 1), 5: (5, 128, 2), 32: (19, 128, 8), 33: (38, 128, 16), 100: (75, 128, 32)}
    wide = {129: (75, 128, 32), 256: (75, 128, 32), 257: (300, 64, 64), 70000: (300, 512, 512)}
    for vectors, table in ((1, grids), (2, wide)):
        for n, expected in table.items():
            assert grid_for_shared_rows(300, np.empty((300, n), np.float32), vectors) == expected
    assert grid_for_shared_rows(300, np.empty((300, 5), np.float32), 4, 32) == (75, 128, 32)


@for_each("dtype", DTYPES)
def test_fully_masked_rows_give_zeros_and_zero_gradients(cuda, dtype):
    x, mask = normal(4, 9), np.ones((4, 9), bool)
    mask[1] = False
    x[2] = -np.inf
    y, pull = vjp(lambda x: softmax(x, cuda.array(mask)), cuda.array(x, dtype))
    for result in (y, pull(cuda.array(normal(4, 9, seed=1), dtype))[0]):
        np.testing.assert_array_equal(to_host(result).any(axis=-1), [True, False, False, True])


# --- decoding ---------------------------------------------------------------------------------------------------------


def rows_for_decoding(n):
    """Return rows without and with equal elements, ascending, of one number, with a NaN, and with infinities."""
    x = np.round(64.0 * normal(7, n)) / 64.0  # exact in all dtypes but for few
    x[1] = np.round(x[1])
    x[2] = np.arange(n) / 4.0
    x[3] = -np.inf
    x[4, ::5], x[5, ::3], x[6, 1::7] = np.nan, np.inf, -np.inf
    x[4, ::10], x[6, 0] = -np.nan, -0.0
    return x


@for_each("n, k", [(1, 1), (2, 2), (31, 5), (100, 100), (256, 7), (257, 50), (5000, 1), (4104, 700), (9001, 1024)])
@for_each("dtype", DTYPES)
def test_top_k(cuda, dtype, n, k):
    """NaN is the largest, as in a sort, and of equal elements the first one comes first."""
    x = cuda.array(rows_for_decoding(max(n, 2))[:, :n], dtype)
    assert cuda.served("top_k", x, k=k)
    values, indices = map(to_host, top_k(x, k))
    host = to_host(x).astype("float64")
    order = np.lexsort((np.where(np.isnan(host), -np.inf, -host), ~np.isnan(host)), axis=-1)[:, :k]
    np.testing.assert_array_equal(indices, order)
    np.testing.assert_array_equal(values.astype("float64"), np.take_along_axis(host, order, axis=-1))


@for_each("n", [1, 8, 33, 5000])
@for_each("dtype", DTYPES)
def test_logsumexp_of_rows_with_infinities_and_nan(cuda, dtype, n):
    x = cuda.array(rows_for_decoding(max(n, 2))[:, :n], dtype)
    got = [to_host(each).astype("float64") for each in OPERATIONS["logsumexp"](x)]
    with np.errstate(invalid="ignore"):
        expected, _ = OPERATIONS["logsumexp"].definition.forward(to_host(x).astype("float64"), save=False)
    for actual, correct in zip(got, expected, strict=True):
        np.testing.assert_allclose(actual, correct, rtol={"float64": 1e-12, "float32": 1e-6}.get(dtype, 1e-2))


# --- integers ---------------------------------------------------------------------------------------------------------


def kernel(operation):
    return next(each for each in rows.KERNELS if each.operation == operation)


def test_integers_out_of_range_give_nan_and_no_gradient(cuda):
    """Integers on a GPU are not read on the host."""
    logits, settings = cuda.array(normal(4, 5), "float32"), {"pad_id": 0, "label_smoothing": 0.0, "z_loss": 0.0}
    loss, residuals = kernel("cross_entropy").forward(logits, cuda.array([-1, 5, 1, 0]), save=True, **settings)
    dlogits, _ = kernel("cross_entropy").vjp(cuda.xp.ones_like(loss), residuals, (True, False), **settings)
    assert np.isnan(to_host(loss)).tolist() == [True, True, False, False]
    assert np.isnan(to_host(dlogits)).all(axis=-1).tolist() == [True, True, False, False]
    ids = cuda.array([-1, 5, 2, 4])
    found, residuals = kernel("embedding").forward(cuda.array(normal(5, 3)), ids, scale=1.0, save=True)
    assert np.isnan(to_host(found)).all(axis=-1).tolist() == [True, True, False, False]
    dtable, _ = kernel("embedding").vjp(cuda.xp.ones_like(found), residuals, (True, False), scale=1.0)
    np.testing.assert_array_equal(to_host(dtable)[:, 0], [0, 0, 1, 0, 1])


def test_ids_of_any_integer_dtype(cuda):
    for dtype in ("int32", "uint16", "uint64"):
        ids = np.asarray([[3, 1], [3, 0]], dtype)
        got = embedding(cuda.array(normal(5, 3)), cuda.array(ids))
        np.testing.assert_array_equal(to_host(got), normal(5, 3)[ids.astype(int)])


# --- derivatives, sums and casts --------------------------------------------------------------------------------------


@for_each("function, hosts", [
    (layer_norm, features((5, 7), 2)),
    (lambda x, weight, bias: project_heads(x, (weight, bias, 2))[0], maps((2, 3, 4), 6)),
])  # fmt: skip
def test_gradients_of_some_inputs(cuda, function, hosts):
    arrays = [cuda.array(array) for array in hosts]
    output, pull = vjp(function, *arrays)
    g = cuda.array(normal(*output.shape, seed=3))
    for place, expected in enumerate(pull(g)):
        _, own = vjp(lambda x, place=place: function(*arrays[:place], x, *arrays[place + 1 :]), arrays[place])
        np.testing.assert_array_equal(to_host(own(g)[0]), to_host(expected))


def test_the_gradient_of_a_transposed_weight_has_its_memory_order(cuda):
    table, x, g = cuda.array(normal(9, 7)), cuda.array(normal(5, 7)), normal(5, 9, seed=3)
    _, pull = vjp(lambda table: linear(x, array_namespace(table).matrix_transpose(table)), table)
    (dtable,) = pull(cuda.array(g))
    assert dtable.flags.c_contiguous
    np.testing.assert_allclose(to_host(dtable), g.T @ normal(5, 7), rtol=1e-12)


@for_each("dtype", DTYPES)
def test_add(cuda, dtype):
    for shape in [(3, 5, 7), (), (0, 4), (64, 300)]:
        x, y = (cuda.array(normal(*shape, seed=seed), dtype) for seed in range(2))
        np.testing.assert_array_equal(to_host(add(x, y)), to_host(x + y))
    x = cuda.array(normal(4, 4), "float32")
    others = x.T, cuda.array(normal(4, 4), "float64"), cuda.array(np.ones((4, 4), int))
    assert all(add(*pair) is None for other in others for pair in ((x, other), (other, x)))


@for_each("most", [112, 2])
@for_each("before, after", CASTS)
def test_cast_has_the_bits_of_numpy(cuda, monkeypatch, before, after, most):
    monkeypatch.setitem(optimizer.MAX_ITEMS, 2, most)
    special = np.array(
        [np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-41, 1e-7, 65519.0, 65520.0, 3e38, 1 + 2**-8, 1 + 3 / 256]
    )
    if cuda.launcher is None:  # on a GPU: CuPy has subnormal numbers flushed to zero
        special[5] = 0.0
    shaped = [np.asarray(normal(*shape)) for shape in [*SHAPES, (9000,)]]
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
