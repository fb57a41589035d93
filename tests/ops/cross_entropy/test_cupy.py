"""Cross-entropy on CuPy equals the portable definition."""

from __future__ import annotations

import functools
import math

import numpy as np

from tests.ops._cupy.cuda_cases import DTYPES, LAYOUTS, normal
from tests.reference import for_each
from xformer import vjp
from xformer.backends import to_host
from xformer.kernels.cupy import rows
from xformer.ops import cross_entropy

LABELS = {
    "some padding": [[3, 0, 12, 5], [1, 7, 0, 0]],
    "all padding": [[0, 0, 0, 0], [0, 0, 0, 0]],
    "no padding": [[3, 1, 12, 5], [1, 7, 1, 2]],
}


@for_each("dtype", DTYPES)
@for_each("labels", LABELS)
@for_each("label_smoothing, z_loss, scale", [(0.0, 0.0, 300.0), (0.1, 0.0, 1.0), (0.1, 0.01, 1.0)])
def test_cross_entropy(cuda, dtype, labels, label_smoothing, z_loss, scale):
    settings = {"pad_id": 0, "label_smoothing": label_smoothing, "z_loss": z_loss}
    logits, ids = scale * normal(2, 4, 13), np.asarray(LABELS[labels])
    assert cuda.served("cross_entropy", cuda.array(logits, dtype), cuda.array(ids), **settings)
    cuda.agree(functools.partial(cross_entropy, **settings), logits, ids, dtype=dtype)
    outside = np.where(ids == 0, -100, ids)
    cuda.agree(functools.partial(cross_entropy, **settings | {"pad_id": -100}), logits, outside, dtype=dtype)


@for_each("label_smoothing", [0.0, 0.1])
def test_an_offset_of_all_logits_changes_nothing(cuda, label_smoothing):
    logits = np.round(8.0 * normal(3, 300)) / 8.0  # exact in float32 with the offset, too
    settings = {"labels": cuda.array([7, 0, 299]), "label_smoothing": label_smoothing}
    expected = to_host(cross_entropy(cuda.array(logits, "float64"), **settings))
    losses = to_host(cross_entropy(cuda.array(logits + 1e6, "float32"), **settings))
    np.testing.assert_allclose(losses, expected, rtol=2e-6)


@for_each("layout", LAYOUTS)
@for_each("dtype", ["float32", "bfloat16"])
def test_layouts(cuda, layout, dtype):
    labels = np.asarray([1, 0, 15, 3, 3])
    cuda.agree(cross_entropy, normal(5, 16), labels, dtype=dtype, layout=LAYOUTS[layout])


def test_more_than_2_to_the_31_logits(cuda):
    """On a GPU; on the host a few."""
    rows, n = (3, 64) if cuda.launcher else (2**16 + 1, 2**15)
    logits = cuda.xp.zeros((rows, n), dtype=cuda.xp.dtype_named("bfloat16"))
    logits[-1, -1] = 5.0
    losses, pull = vjp(lambda logits: cross_entropy(logits, cuda.xp.full(rows, n - 1)), logits)
    np.testing.assert_allclose(to_host(losses[:-1]), math.log(n), rtol=1e-5)
    np.testing.assert_allclose(to_host(losses[-1]), math.log(n - 1 + math.exp(5.0)) - 5.0, rtol=1e-5)
    (g,) = pull(cuda.xp.ones_like(losses))
    probability = math.exp(5.0) / (n - 1 + math.exp(5.0))
    np.testing.assert_allclose(to_host(g[:, -1]), [*[1.0 / n - 1.0] * (rows - 1), probability - 1.0], rtol=0.01)
    np.testing.assert_allclose(to_host(g[-1, :-1]), (1.0 - probability) / (n - 1), rtol=0.01)


@for_each("dtype", DTYPES)
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
    kernel = next(each for each in rows.KERNELS if each.operation == "cross_entropy")
    settings = {"pad_id": 0, "label_smoothing": 0.0, "z_loss": 0.0}
    loss, residuals = kernel.forward(logits, labels, save=True, **settings)
    dlogits, _ = kernel.vjp(cuda.xp.ones_like(loss), residuals, (True, False), **settings)
    assert np.isnan(to_host(loss)).tolist() == [True, True, False, False]
    assert np.isnan(to_host(dlogits)).all(axis=-1).tolist() == [True, True, False, False]
