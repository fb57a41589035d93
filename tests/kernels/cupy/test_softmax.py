"""Softmax and cross-entropy on CuPy equal the portable definitions."""

from __future__ import annotations

import functools
import math

import numpy as np
import pytest

from tests.kernels.cupy.cuda_cases import DTYPES, LAYOUTS, normal
from xformer import kernels, vjp
from xformer.backends import dtype_named, to_host
from xformer.kernels import registry
from xformer.kernels.cupy.grid import grid_for_short_rows
from xformer.ops import cross_entropy, softmax

MASKS = {
    "none": None,
    "keys of a sentence": (2, 1, 1, 11),
    "queries and keys": (5, 11),
    "queries": (1, 1, 5, 1),
    "full": (2, 3, 5, 11),
    "heads": (3, 1, 11),
    "one": (1,),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mask", MASKS)
def test_softmax(cuda, dtype, mask):
    shape = MASKS[mask]
    allowed = None if shape is None else np.random.default_rng(5).random(shape) < 0.6
    scores = normal(2, 3, 5, 11)
    assert cuda.served("softmax", cuda.array(scores, dtype), None if shape is None else cuda.array(allowed))
    cuda.agree(softmax, *([scores] if shape is None else [scores, allowed]), dtype=dtype)


@pytest.mark.parametrize("shape", [(7,), (3, 1), (4, 700), (0, 5), (2, 2, 2, 2, 2, 3)], ids=str)
def test_softmax_of_rows_of_any_length(cuda, shape):
    cuda.agree(softmax, 30.0 * normal(*shape), dtype="float32")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [1, 4, 31, 32, 33, 64, 65, 512])
def test_short_rows_share_blocks(cuda, dtype, n):
    """Blocks have more rows than are left; a row with NaN does not change its neighbors."""
    scores, mask = normal(37, n), np.random.default_rng(5).random((37, n)) < 0.8
    cuda.agree(softmax, scores, mask, dtype=dtype)
    scores[5, 0], scores[7] = np.nan, -np.inf
    y = to_host(softmax(cuda.array(scores, dtype))).astype("float64")
    np.testing.assert_array_equal(np.isnan(y).any(axis=-1), np.arange(37) == 5)
    assert not y[7].any()
    _, pull = vjp(softmax, cuda.array(scores, dtype))
    (dx,) = pull(cuda.array(np.ones((37, n)), dtype))
    np.testing.assert_array_equal(np.isnan(to_host(dx).astype("float64")).any(axis=-1), np.arange(37) == 5)


def test_grids_of_short_rows():
    for n, expected in {
        1: (3, 128, 1),
        4: (3, 128, 1),
        5: (5, 128, 2),
        32: (19, 128, 8),
        33: (38, 128, 16),
        100: (75, 128, 32),
        512: (75, 128, 32),
        513: (300, 160, 160),
        70000: (300, 512, 512),
    }.items():
        assert grid_for_short_rows(300, np.empty((300, n), np.float32)) == expected


def test_a_mask_with_more_strided_axes_than_the_kernel_takes(cuda):
    x, mask = normal(2, 2, 2, 2, 2, 3), np.random.default_rng(6).random((2, 1, 2, 1, 2, 1)) < 0.5
    got = to_host(softmax(cuda.array(x), cuda.array(mask)))
    np.testing.assert_allclose(got, softmax_by_hand(x, mask), rtol=1e-12)
    swapped = np.random.default_rng(6).random((3, 2)) < 0.5
    got = to_host(softmax(cuda.array(x), cuda.array(swapped).T))
    np.testing.assert_allclose(got, softmax_by_hand(x, swapped.T), rtol=1e-12)


def softmax_by_hand(x, mask):
    powers = np.where(mask, np.exp(x), 0.0)
    total = powers.sum(axis=-1, keepdims=True)
    return np.divide(powers, total, out=np.zeros_like(powers), where=total > 0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_fully_masked_rows_give_zeros_and_zero_gradients(cuda, dtype):
    x, mask = normal(4, 9), np.ones((4, 9), bool)
    mask[1] = False
    x[2] = -np.inf
    y, pull = vjp(lambda x: softmax(x, cuda.array(mask)), cuda.array(x, dtype))
    (dx,) = pull(cuda.array(normal(4, 9, seed=1), dtype))
    np.testing.assert_array_equal(to_host(y).any(axis=-1), [True, False, False, True])
    np.testing.assert_array_equal(to_host(dx).any(axis=-1), [True, False, False, True])


def test_unsupported_masks(cuda):
    x, mask = cuda.array(normal(1, 3)), cuda.array(np.ones((4, 3), bool))
    for wrong, reason in [
        (mask, "the mask is larger than the scores"),
        (cuda.array(np.ones((1, 3), np.int64)), "a mask of dtype int64 (kernels take bool)"),
    ]:
        assert f"  not cupy.softmax: {reason}" in kernels.explain("softmax", x, wrong)
    assert tuple(softmax(x, mask).shape) == (4, 3)


# --- cross_entropy ------------------------------------------------------------------

LABELS = {
    "some padding": [[3, 0, 12, 5], [1, 7, 0, 0]],
    "all padding": [[0, 0, 0, 0], [0, 0, 0, 0]],
    "no padding": [[3, 1, 12, 5], [1, 7, 1, 2]],
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("labels", LABELS)
@pytest.mark.parametrize(("label_smoothing", "z_loss", "scale"), [(0.0, 0.0, 300.0), (0.1, 0.0, 1.0), (0.1, 0.01, 1.0)])
def test_cross_entropy(cuda, dtype, labels, label_smoothing, z_loss, scale):
    settings = {"pad_id": 0, "label_smoothing": label_smoothing, "z_loss": z_loss}
    logits, ids = scale * normal(2, 4, 13), np.asarray(LABELS[labels])
    assert cuda.served("cross_entropy", cuda.array(logits, dtype), cuda.array(ids), **settings)
    cuda.agree(functools.partial(cross_entropy, **settings), logits, ids, dtype=dtype)
    outside = np.where(ids == 0, -100, ids)
    cuda.agree(functools.partial(cross_entropy, **settings | {"pad_id": -100}), logits, outside, dtype=dtype)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_layouts(cuda, layout, dtype):
    labels = np.asarray([1, 0, 15, 3, 3])
    cuda.agree(cross_entropy, normal(5, 16), labels, dtype=dtype, layout=LAYOUTS[layout])
    cuda.agree(softmax, normal(5, 16), dtype=dtype, layout=LAYOUTS[layout])


def test_more_than_2_to_the_31_logits(cuda):
    """On a GPU; on the host a few."""
    rows, n = (3, 64) if cuda.launcher else (2**16 + 1, 2**15)
    logits = cuda.xp.zeros((rows, n), dtype=dtype_named(cuda.xp, "bfloat16"))
    logits[-1, -1] = 5.0
    losses, pull = vjp(lambda logits: cross_entropy(logits, cuda.xp.full(rows, n - 1)), logits)
    np.testing.assert_allclose(to_host(losses[:-1]), math.log(n), rtol=1e-5)
    np.testing.assert_allclose(to_host(losses[-1]), math.log(n - 1 + math.exp(5.0)) - 5.0, rtol=1e-5)
    (g,) = pull(cuda.xp.ones_like(losses))
    probability = math.exp(5.0) / (n - 1 + math.exp(5.0))
    np.testing.assert_allclose(to_host(g[:, -1]), [*[1.0 / n - 1.0] * (rows - 1), probability - 1.0], rtol=0.01)
    np.testing.assert_allclose(to_host(g[-1, :-1]), (1.0 - probability) / (n - 1), rtol=0.01)


@pytest.mark.parametrize("dtype", DTYPES)
def test_large_vocabularies_and_empty_batches(cuda, dtype):
    labels = np.random.default_rng(4).integers(0, 3001, 6)
    loss = functools.partial(cross_entropy, label_smoothing=0.1, z_loss=0.1)
    cuda.agree(loss, normal(6, 3001), labels, dtype=dtype)
    cuda.agree(loss, normal(0, 5, 7), labels[:0].reshape(0, 5), dtype=dtype)


def test_logits_of_16_bits_give_float32_losses_and_gradients_of_16_bits(cuda):
    output, pull = vjp(lambda x: cross_entropy(x, cuda.array([1, 2])), cuda.array(normal(2, 5), "bfloat16"))
    assert str(output.dtype) == "float32"
    assert str(pull(cuda.xp.ones_like(output))[0].dtype) == "bfloat16"


def test_logits_with_infinities_and_nan(cuda):
    """Padded rows may hold anything; a logit of minus infinity has no probability."""
    logits = normal(3, 5)
    logits[0], logits[1, 2] = np.nan, -np.inf
    loss, pull = vjp(lambda x: cross_entropy(x, cuda.array([0, 1, 3]), pad_id=0), cuda.array(logits, "float32"))
    (dlogits,) = pull(cuda.xp.ones_like(loss))
    assert to_host(loss)[0] == 0
    assert np.isfinite(to_host(loss)).all()
    assert not to_host(dlogits)[0].any()
    assert np.isfinite(to_host(dlogits)).all()
    assert to_host(dlogits)[1, 2] == 0


def test_a_label_out_of_range_gives_nan(cuda):
    """Labels on a GPU are not read on the host; the kernel returns NaN for those out of range."""
    logits, labels = cuda.array(normal(4, 5), "float32"), cuda.array([-1, 5, 1, 0])
    kernel = registry.select("cross_entropy", cuda.xp, (logits, labels), {})
    settings = {"pad_id": 0, "label_smoothing": 0.0, "z_loss": 0.0}
    loss, residuals = kernel.forward(logits, labels, save=True, **settings)
    dlogits, _ = kernel.vjp(cuda.xp.ones_like(loss), residuals, (True, False), **settings)
    assert np.isnan(to_host(loss)).tolist() == [True, True, False, False]
    assert np.isnan(to_host(dlogits)).all(axis=-1).tolist() == [True, True, False, False]
