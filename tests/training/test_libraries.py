"""A library makes the same training step as NumPy: CuPy on a GPU, and torch to test the test."""

from __future__ import annotations

import dataclasses
import functools
import itertools

import numpy as np
import pytest

from tests.conftest import library_or_skip
from xformer.backends import array_namespace, to_host
from xformer.models import LanguageModel, LanguageModelConfig, Transformer, TransformerConfig
from xformer.ops import cross_entropy
from xformer.training import Adam, Batch, TokenPairs, fit, train_step, translation_loss

RNG = np.random.default_rng(0)
SOURCES = [RNG.integers(3, 24, int(length)).tolist() for length in RNG.integers(3, 8, 16)]
PAIRS = TokenPairs(SOURCES, [row[::-1] for row in SOURCES])
CONFIG = TransformerConfig(
    source_vocab_size=24,
    target_vocab_size=24,
    d_model=64,
    num_heads=4,
    d_ff=128,
    num_encoder_layers=2,
    num_decoder_layers=2,
    dropout=0.0,
)


def step(name, dtype):
    """Make one step from the state of the seed."""
    xp = library_or_skip(name) if isinstance(name, str) else name
    optimizer = Adam(epsilon=1e-3)  # smaller ones amplify rounding
    model = Transformer(CONFIG, xp=xp, seed=0, dtype=dtype)
    loss = functools.partial(translation_loss, label_smoothing=0.1)
    batch = Batch.make(PAIRS, list(range(16)), xp=xp)
    options = {"loss_fn": loss, "optimizer": optimizer, "learning_rate": 2e-3, "max_grad_norm": 1.0}
    return train_step(model, optimizer.init(model), [batch], None, **options)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-4), ("float64", 1e-10)])
@pytest.mark.parametrize("name", ["torch", pytest.param("cupy", marks=pytest.mark.gpu)])
def test_a_training_step_is_that_of_numpy(name, dtype, tolerance):
    result, expected = step(name, dtype), step("numpy", dtype)
    assert float(result.loss) == pytest.approx(float(expected.loss), rel=tolerance)
    assert float(result.grad_norm) == pytest.approx(float(expected.grad_norm), rel=tolerance)
    parameters = dict(expected.model.named_parameters())
    for key, array in result.model.named_parameters():
        np.testing.assert_allclose(to_host(array), parameters[key], rtol=0.0, atol=tolerance)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_steps_as_graphs_are_those_without(precision):
    """With dropout, whose masks differ from step to step."""
    xp, losses = library_or_skip("cupy"), []
    batches = [Batch.make(PAIRS, rows, xp=xp) for rows in (list(range(8)), list(range(8, 16)))]
    for jit in (False, True):
        model = Transformer(dataclasses.replace(CONFIG, dropout=0.1), xp=xp, seed=0)
        options = {"optimizer": Adam(), "learning_rate": 1e-3, "steps": 12, "precision": precision}
        losses.append([event.loss for event in fit(model, translation_loss, batches, jit=jit, **options)[1]])
    assert losses[0] == losses[1]


@pytest.mark.parametrize(
    ("name", "jit"),
    [*itertools.product(["numpy", "torch", "array_api_strict"], [False, True]), ("jax", True)],
)
def test_batches_of_numpy_arrays_and_lists(name, jit):
    config = LanguageModelConfig(vocab_size=11, d_model=8, num_heads=2, d_ff=12, num_layers=1, dropout=0.0)
    tokens, losses = RNG.integers(3, 11, (2, 5)), []
    for convert in (lambda ids: ids,) if jit else (np.asarray, np.ndarray.tolist):

        def loss_fn(model, tokens, rng, convert=convert):
            logits = model(convert(tokens[:, :-1]), rng=rng)
            return array_namespace(logits).sum(cross_entropy(logits, convert(tokens[:, 1:])))

        model = LanguageModel(config, xp=library_or_skip(name), seed=0)
        options = {"optimizer": Adam(), "learning_rate": 0.1, "steps": 4, "num_tokens": lambda tokens: 8}
        losses.append([event.loss for event in fit(model, loss_fn, [tokens], jit=jit, **options)[1]])
    assert losses[0] == losses[-1]
    assert losses[0][-1] < 0.8 * losses[0][0]


def test_steps_on_lazy_arrays_do_not_compute_earlier_ones_again():
    """Else the time of a step of Dask grows with the number of steps before it."""
    result = step(pytest.importorskip("dask.array"), "float32")
    assert {
        len(array.dask) for array in (result.loss, result.grad_norm, *dict(result.model.named_arrays()).values())
    } == {1}
