"""New parameters: the same in every library, with the spread they should have."""

from __future__ import annotations

import numpy as np
import pytest

from tests.conftest import assert_close
from tests.reference import small_model
from xformer import Initializer, Rng
from xformer.layers import FeedForward, LayerNorm
from xformer.tree import flatten


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_one_seed_gives_the_same_parameters_in_every_library(xp, dtype):
    expected = flatten(small_model(dtype=dtype, seed=3, output_bias=True))[0]
    for array, expected_array in zip(
        flatten(small_model(xp, dtype=dtype, seed=3, output_bias=True))[0], expected, strict=True
    ):
        assert_close(array, expected_array, xp=xp, tolerance=0.0)


def test_float32_parameters_are_the_rounded_float64_ones():
    narrow, wide = (flatten(small_model(dtype=dtype))[0] for dtype in ("float32", "float64"))
    for array, expected in zip(narrow, wide, strict=True):
        np.testing.assert_array_equal(array, expected.astype("float32"))


def test_another_seed_gives_other_parameters():
    first, second = small_model(seed=0), small_model(seed=1)
    assert (first.source_embedding.weight != second.source_embedding.weight).all()


def test_all_matrices_differ():
    matrices = [array for array in flatten(small_model())[0] if array.ndim == 2]
    assert len({float(array[0, 0]) for array in matrices}) == len(matrices)


def test_the_variance_of_initial_values():
    init = Initializer("numpy", dtype="float64")
    uniform = init.xavier_uniform((200, 400))
    bound = (6.0 / 600.0) ** 0.5
    assert 0.99 * bound < np.abs(uniform).max() <= bound
    assert abs(uniform.var() - 2.0 / 600.0) < 1e-4
    assert abs(init.normal((300, 300), 0.5).std() - 0.5) < 0.01
    assert not init.zeros((3,)).any()
    assert not init.zeros((2, 2)).any()
    assert (init.ones((3,)) == 1.0).all()


def test_embeddings_start_at_unit_variance_once_scaled():
    model = small_model(source_vocab_size=3000, d_model=64)
    assert abs(model.source_embedding(np.arange(3000)).std() - 1.0) < 0.02


def test_an_rng_can_replace_the_seed():
    arrays = [
        Initializer("numpy", seed=Rng(4).fold_in("parameters")).normal((2, 2), 1.0),
        Initializer("numpy", seed=4).normal((2, 2), 1.0),
    ]
    assert_close(*arrays, tolerance=0.0)


def test_layers_without_bias():
    init = Initializer("numpy")
    assert [name for name, _ in LayerNorm(4, bias=False, init=init).named_parameters()] == ["weight"]
    assert len(flatten(FeedForward(4, 8, bias=False, init=init))[0]) == 2
