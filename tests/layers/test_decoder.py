"""The decoder layer equals torch.nn.TransformerDecoderLayer, gradients included."""

from __future__ import annotations

import importlib

import numpy as np
import pytest

from tests.conftest import assert_close
from tests.reference import decoder_layer_arrays, gradients, normal, randomize, small_parts, values, weighted_sum
from xformer import masks, value_and_grad
from xformer.ops import attention, attention_weights
from xformer.tracing.activations import record
from xformer.tree import replace

TARGET = masks.padding(np.asarray([[3, 4, 0, 0], [1, 2, 3, 4]]), 0)
MEMORY = masks.padding(np.asarray([[3, 4, 5, 6, 7], [1, 2, 3, 0, 0]]), 0)


@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("norm_position", ["pre", "post"])
@pytest.mark.parametrize("masked", [True, False], ids=["padding", "no mask"])
def test_output_and_gradients_equal_those_of_torch(activation, norm_position, masked):
    torch = pytest.importorskip("torch", reason="torch is what it is compared with")
    theirs = randomize(
        torch.nn.TransformerDecoderLayer(
            8,
            2,
            12,
            dropout=0.0,
            activation=activation,
            batch_first=True,
            norm_first=norm_position == "pre",
            dtype=torch.float64,
        )
    )
    x, memory, g = normal(0, 2, 4, 8), normal(1, 2, 5, 8), normal(2, 2, 4, 8)
    torch_x, torch_memory = (torch.tensor(array, requires_grad=True) for array in (x, memory))
    future = torch.tensor(~masks.causal(4, xp="numpy"))
    padding = (
        {
            "tgt_key_padding_mask": torch.tensor(~TARGET[:, 0, 0, :]),
            "memory_key_padding_mask": torch.tensor(~MEMORY[:, 0, 0, :]),
        }
        if masked
        else {}
    )
    expected = theirs(torch_x, torch_memory, tgt_mask=future, **padding)
    (expected * torch.tensor(g)).sum().backward()

    layer = replace(
        small_parts(activation=activation, norm_position=norm_position).decoder_layer(),
        decoder_layer_arrays(theirs, values),
    )
    ours = {"mask": TARGET, "memory_mask": MEMORY} if masked else {}
    assert_close(layer(x, memory, **ours), expected.detach().numpy())
    _, (actual, dx, dmemory) = value_and_grad(lambda inputs: weighted_sum(inputs[0](*inputs[1:], **ours), g))(
        (layer, x, memory)
    )
    assert_close(dx, torch_x.grad.numpy())
    assert_close(dmemory, torch_memory.grad.numpy())
    expected_gradients = decoder_layer_arrays(theirs, gradients)
    for name, gradient in actual.named_parameters():
        assert_close(gradient, expected_gradients[name])


@pytest.mark.parametrize("norm_position", ["pre", "post"])
def test_cross_attention_weights_are_those_that_the_layer_uses(norm_position, monkeypatch):
    module, used = importlib.import_module("xformer.layers.attention"), []

    def watched(query, key, value, mask, bias, *, causal=False, **options):
        used.append(attention_weights(query, key, mask, bias, causal=causal))
        return attention(query, key, value, mask, bias, causal=causal, **options)

    monkeypatch.setattr(module, "attention", watched)
    layer = small_parts(norm_position=norm_position).decoder_layer()
    inputs = {"mask": TARGET, "memory_mask": MEMORY}
    with record(layer, "cross_attention.weights") as recorded:
        layer(normal(0, 2, 4, 8), normal(1, 2, 5, 8), **inputs)
    weights = recorded["cross_attention.weights"]
    assert_close(weights, used[1])
    np.testing.assert_allclose(weights.sum(axis=-1), 1.0)
    assert (weights[1, :, :, 3:] == 0.0).all()
