"""Convolutions over time equal those of torch."""

from __future__ import annotations

import numpy as np
import pytest

from tests.conftest import assert_close
from tests.reference import normal, raises_line, weighted_sum, without_jax
from xformer import Initializer, value_and_grad
from xformer.backends import from_host
from xformer.errors import ShapeError
from xformer.layers import AudioEmbedding, Conv1d


@pytest.mark.parametrize(("kernel_size", "stride", "padding", "length"), [(3, 1, 1, 7), (3, 2, 1, 8), (4, 3, 0, 9)])
def test_convolution_and_its_gradients_equal_those_of_torch(kernel_size, stride, padding, length):
    torch = pytest.importorskip("torch")
    init = Initializer(dtype="float64")
    layer = Conv1d(4, 5, kernel_size=kernel_size, stride=stride, padding=padding, init=init)
    x = normal(1, 2, length, 4)
    weight, bias = (torch.tensor(np.array(y.T), requires_grad=True) for y in (layer.weight, layer.bias))
    source = torch.tensor(x, requires_grad=True)
    expected = torch.nn.functional.conv1d(
        source.transpose(1, 2), weight, bias, stride=stride, padding=padding
    ).transpose(1, 2)
    weights = normal(2, *expected.shape)
    assert_close(layer(x), expected.detach().numpy())
    (expected * torch.tensor(weights)).sum().backward()
    _, (dlayer, dx) = value_and_grad(lambda both: weighted_sum(both[0](both[1]), weights))((layer, x))
    assert_close(dx, source.grad.numpy())
    assert_close(dlayer.weight, weight.grad.numpy().T)
    assert_close(dlayer.bias, bias.grad.numpy())


@without_jax
def test_audio_embedding_halves_the_frames_on_every_library(xp):
    x = normal(1, 2, 9, 4)
    expected = AudioEmbedding(4, 6, init=Initializer(dtype="float64"))(x)
    assert expected.shape == (2, 5, 6)
    assert_close(AudioEmbedding(4, 6, init=Initializer(xp, dtype="float64"))(from_host(xp, x)), expected, xp=xp)


@pytest.mark.parametrize("shape", [(2, 9), (2, 9, 5), (2, 0, 4)])
def test_inputs_of_another_shape_are_errors(shape):
    with raises_line(ShapeError, r"x has shape .*; expected \(batch, length, 4\) with a length of at least 1"):
        Conv1d(4, 5, init=0)(np.zeros(shape))
