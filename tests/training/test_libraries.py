"""A library trains and translates as NumPy does: on CuPy where there is a GPU, and on torch to test the test."""

from __future__ import annotations

import functools
import math

import numpy as np
import pytest

from tests.conftest import library_or_skip
from xformer.backends import to_host
from xformer.generation import generate
from xformer.models import Transformer, TransformerConfig
from xformer.random import Rng
from xformer.training import Adam, Batch, TokenPairs, train_step, translation_loss
from xformer.training.data_parallel import ShardedGradient
from xformer.training.loss import weighted_loss

UPDATES = 50
RNG = np.random.default_rng(0)
SOURCES = [RNG.integers(3, 24, int(length)).tolist() for length in RNG.integers(3, 8, 64)]
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


@functools.cache
def trained(name, dtype):
    """A model after some updates, and the losses on the way."""
    xp = library_or_skip(name)
    model = Transformer(CONFIG, xp=xp, seed=0, dtype=dtype)
    optimizer = Adam()
    state, losses = optimizer.init(model), []
    objective = functools.partial(weighted_loss, loss=functools.partial(translation_loss, label_smoothing=0.1))
    gradient = ShardedGradient(objective, 1)
    for step in range(UPDATES):
        batch = Batch.make(PAIRS, list(range(step % 4 * 16, step % 4 * 16 + 16)), xp=xp)
        how = {"gradient": gradient, "optimizer": optimizer, "learning_rate": 2e-3, "max_grad_norm": 1.0}
        result = train_step(model, state, [[batch]], Rng(step), **how)
        model, state = result.model, result.state
        losses.append(result.loss)
    return model, losses


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-3), ("float64", 1e-10)])
@pytest.mark.parametrize("name", ["torch", pytest.param("cupy", marks=pytest.mark.gpu)])
def test_training_and_translating_are_those_of_numpy(name, dtype, tolerance):
    model, losses = trained(name, dtype)
    reference, expected = trained("numpy", dtype)
    assert expected[-1] < 0.9 * expected[0]
    for loss, wanted in zip(losses, expected, strict=True):
        assert math.isclose(loss, wanted, rel_tol=tolerance)
    ids = np.asarray([[*row, 2] + [0] * (7 - len(row)) for row in SOURCES])
    outputs, expected = (generate(each, ids, max_new_tokens=12) for each in (model, reference))
    assert [one[0].tokens for one in outputs] == [one[0].tokens for one in expected]
    weight, wanted = (to_host(each.source_embedding.weight) for each in (model, reference))
    assert float(abs(weight - wanted).max()) < 100 * tolerance
