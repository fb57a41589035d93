"""A library makes the same training step as NumPy: CuPy on a GPU, and torch to test the test."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from tests.conftest import library_or_skip
from xformer.backends import to_host
from xformer.models import Transformer, TransformerConfig
from xformer.training import Adam, Batch, TokenPairs, train_step, translation_loss

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
    xp, optimizer = (
        library_or_skip(name),
        Adam(epsilon=1e-3),
    )  # smaller ones amplify rounding
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
