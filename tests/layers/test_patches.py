"""The patches of images."""

from __future__ import annotations

import numpy as np
import pytest

import xformer as xf
from tests.conftest import assert_close
from tests.reference import normal, raises_line
from xformer.errors import ShapeError
from xformer.layers import Initializer, PatchEmbedding


@pytest.fixture
def layer():
    return PatchEmbedding(3, 5, patch_size=2, init=Initializer(seed=0, dtype="float64"))


def test_a_patch_is_multiplied_by_the_weight_after_the_class_token(layer):
    images = normal(1, 2, 3, 4, 6)
    outputs = layer(images)
    assert outputs.shape == (2, 7, 5)
    assert_close(outputs[:, 0], np.broadcast_to(layer.class_token, (2, 5)))
    for index in range(6):
        row, column = 2 * (index // 3), 2 * (index % 3)
        patch = images[:, :, row : row + 2, column : column + 2]
        assert_close(outputs[:, 1 + index], np.einsum("bchw,whcd->bd", patch, layer.weight) + layer.bias)


def test_gradients_reach_the_pixels(layer):
    weights, images = normal(2, 1, 3, 5), normal(3, 1, 3, 4, 2)
    _, gradient = xf.value_and_grad(lambda x: xf.array_namespace(x).sum(layer(x) * weights))(images)
    expected = np.einsum("bpd,whcd->bcphw", weights[:, 1:], layer.weight).reshape(1, 3, 4, 2)
    assert_close(gradient, expected)


def test_images_that_patches_do_not_fill_are_refused(layer):
    for shape in ((2, 3, 4, 5), (2, 2, 4, 4), (3, 4, 4), (2, 3, 0, 4)):
        with raises_line(ShapeError, r"expected \(batch, 3, height, width\) with multiples of 2"):
            layer(np.zeros(shape))
