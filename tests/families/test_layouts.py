"""Layouts of tensors and their inverses."""

import numpy as np
import pytest

from xformer.families.layouts import fused_by_head, interleaved, stacked_experts


@pytest.mark.parametrize("shape", [(12, 3), (12,)])
def test_interleaved_features_are_moved_to_separate_halves(shape):
    layout = interleaved("query.weight", head_dim=6, num_features=4)
    x = np.random.default_rng(0).normal(size=shape)
    (actual,) = layout.split(x, [shape[::-1]])
    order = [0, 2, 1, 3, 4, 5, 6, 8, 7, 9, 10, 11]  # two heads; the last two features of each are not rotated
    np.testing.assert_array_equal(actual, x[order].T)
    np.testing.assert_array_equal(layout.join([actual]), x)


@pytest.mark.parametrize("shape", [(3, 5, 4), (3, 4)])
def test_stacked_experts_interleave_their_parameters(shape):
    layout = stacked_experts(3, "experts.{e}.gate", "experts.{e}.up")
    assert layout.parameters[:3] == ("experts.0.gate", "experts.0.up", "experts.1.gate")
    x = np.random.default_rng(0).normal(size=shape)
    values = layout.split(x, [])
    np.testing.assert_array_equal(values[2], x[1, ..., [0, 2]].T if len(shape) == 3 else x[1, [0, 2]])
    np.testing.assert_array_equal(layout.join(values), x)


@pytest.mark.parametrize("shape", [(), (2, 5, 4)])
def test_stacked_experts_of_another_number_are_left_as_they_are(shape):
    (actual,) = stacked_experts(3, "experts.{e}.gate").split(np.ones(shape), [])
    assert actual.shape == shape


@pytest.mark.parametrize("num_columns", [3, None])
def test_queries_of_a_group_precede_their_key_and_value(num_columns):
    columns = [] if num_columns is None else [num_columns]
    x = np.random.default_rng(0).normal(size=(16, *columns))  # two groups of two queries, a key and a value of size 2
    layout = fused_by_head(2, "query.weight", "key.weight", "value.weight")
    query, key, value = layout.split(x, [(*columns, 8), (*columns, 4), (*columns, 4)])
    np.testing.assert_array_equal(query, x[[0, 1, 2, 3, 8, 9, 10, 11]].T)
    np.testing.assert_array_equal(key, x[[4, 5, 12, 13]].T)
    np.testing.assert_array_equal(value, x[[6, 7, 14, 15]].T)
    np.testing.assert_array_equal(layout.join([query, key, value]), x)


def test_a_fused_tensor_of_another_size_is_left_as_it_is():
    (actual,) = fused_by_head(2, "query.weight", "key.weight").split(np.ones((7, 3)), [(3, 4), (3, 4)])
    assert actual.shape == (3, 7)
