"""The encoder layer equals torch.nn.TransformerEncoderLayer, gradients included."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from tests.conftest import assert_close
from tests.reference import encoder_layer_arrays, gradients, normal, randomize, small_parts, values, weighted_sum
from xformer import masks, value_and_grad
from xformer.tree import replace

PADDING = masks.padding(np.asarray([[3, 4, 0, 0, 0], [1, 2, 3, 4, 0]]), 0)


@pytest.mark.parametrize("activation", ["relu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize("norm_position", ["pre", "post"])
@pytest.mark.parametrize("mask", [None, PADDING], ids=["no mask", "padding"])
def test_output_and_gradients_equal_those_of_torch(activation, norm_position, mask):
    torch = pytest.importorskip("torch", reason="torch is what it is compared with")
    theirs = randomize(
        torch.nn.TransformerEncoderLayer(
            8,
            2,
            12,
            dropout=0.0,
            activation=functools.partial(torch.nn.functional.gelu, approximate="tanh")
            if activation == "gelu_tanh"
            else activation,
            layer_norm_eps=1e-6,
            batch_first=True,
            norm_first=norm_position == "pre",
            dtype=torch.float64,
        )
    )
    x, g = normal(0, 2, 5, 8), normal(1, 2, 5, 8)
    torch_x = torch.tensor(x, requires_grad=True)
    expected = theirs(torch_x, src_key_padding_mask=None if mask is None else torch.tensor(~mask[:, 0, 0, :]))
    (expected * torch.tensor(g)).sum().backward()

    parts = small_parts(activation=activation, norm_position=norm_position, norm_epsilon=1e-6)
    layer = replace(parts.encoder_layer(), encoder_layer_arrays(theirs, values))
    assert_close(layer(x, mask=mask), expected.detach().numpy())
    _, (actual, dx) = value_and_grad(lambda inputs: weighted_sum(inputs[0](inputs[1], mask=mask), g))((layer, x))
    assert_close(dx, torch_x.grad.numpy())
    expected_gradients = encoder_layer_arrays(theirs, gradients)
    for name, gradient in actual.named_parameters():
        assert_close(gradient, expected_gradients[name])


@pytest.mark.parametrize("qk_norm", [False, True])
def test_a_norm_of_the_output_is_inside_the_residual_connection(qk_norm):
    layer = small_parts(norm_position="output", norm="rms", qk_norm=qk_norm, qk_norm_all_heads=True).encoder_layer()
    noise = {name: array + 0.2 * normal(1, *array.shape) for name, array in layer.named_parameters()}
    layer, x = replace(layer, noise), normal(0, 2, 5, 8)
    y = x + layer.self_attention_residual.norm(layer.self_attention(x, causal=True))
    assert_close(layer(x, causal=True), y + layer.feed_forward_residual.norm(layer.feed_forward(y)))


@pytest.mark.parametrize("norm_position", ["pre", "post", "sandwich", "output", "parallel"])
def test_outputs_of_sublayers_are_scaled(norm_position):
    is_parallel = norm_position == "parallel"
    settings = {"norm_position": "pre" if is_parallel else norm_position, "parallel_residual": is_parallel}
    scaled, plain = (small_parts(**settings, residual_scale=scale).encoder_layer() for scale in (0.25, 1.0))
    attention, feed = plain.self_attention_residual, plain.feed_forward_residual
    residuals = {
        "pre": lambda part, x, f: x + 0.25 * f(part.norm(x)),
        "post": lambda part, x, f: part.norm(x + 0.25 * f(x)),
        "sandwich": lambda part, x, f: x + 0.25 * part.norm_after(f(part.norm(x))),
        "output": lambda part, x, f: x + 0.25 * part.norm(f(x)),
    }
    x = normal(0, 2, 5, 8)
    if is_parallel:
        expected = x + 0.25 * (plain.self_attention(attention.norm(x)) + plain.feed_forward(feed.norm(x)))
    else:
        apply = residuals[norm_position]
        expected = apply(feed, apply(attention, x, plain.self_attention), plain.feed_forward)
    assert_close(scaled(x), expected)


def test_attention_and_feed_forward_may_share_a_norm():
    layer, x = (
        small_parts(parallel_residual=True, shared_norm=True, residual_scale=0.5).encoder_layer(),
        normal(0, 2, 5, 8),
    )
    layer = replace(layer, {name: array + 0.2 * normal(1, *array.shape) for name, array in layer.named_arrays()})
    y = layer.residual.norm(x)
    assert_close(layer(x), x + 0.5 * (layer.self_attention(y) + layer.feed_forward(y)))
