"""The figures of the reference systems in tests/data, reproduced to 1e-12."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from tests.conftest import assert_close
from tests.reference import without_jax
from xformer import Initializer, cross_entropy, masks
from xformer.layers import EncoderLayer, FeedForward, LayerNorm, MultiHeadAttention, sinusoidal
from xformer.namespace import from_host
from xformer.ops import attention, attention_weights
from xformer.tree import replace

TOLERANCE = 1e-12
pytestmark = without_jax


def golden(name: str, xp: Any) -> dict[str, Any]:
    """The arrays of one file, in the library `xp`."""
    with np.load(Path(__file__).parent / "data" / f"{name}.npz") as file:
        return {key: from_host(xp, file[key]) for key in file}


def with_weights(module: Any, **arrays: Any) -> Any:
    """The module with these parameters; `__` stands for the dot in their names."""
    return replace(module, {name.replace("__", "."): array for name, array in arrays.items()})


@pytest.fixture
def init(xp):
    return Initializer(xp, dtype="float64")


def test_attention(xp):
    g = golden("attention", xp)
    query, key, value, attend = g["query"], g["key"], g["value"], g["attend"]
    assert_close(attention(query, key, value, attend), g["output"], tolerance=TOLERANCE)
    assert_close(attention(query, key, value), g["output_unmasked"], tolerance=TOLERANCE)
    assert_close(attention_weights(query, key, attend), g["weights"], tolerance=TOLERANCE)
    assert_close(attention_weights(query, key), g["weights_unmasked"], tolerance=TOLERANCE)


class KeyAndValue(NamedTuple):
    """Lets a layer attend to keys and values that come from two arrays, as the reference system does."""

    key: Any
    value: Any

    def update(self, layer, memory):
        return layer.split_heads(layer.key(self.key)), layer.split_heads(layer.value(self.value))


def test_multi_head_attention(xp, init):
    g = golden("multi_head_attention", xp)
    layer = with_weights(
        MultiHeadAttention(12, int(g["num_heads"]), bias=False, init=init),
        query__weight=g["W_q"],
        key__weight=g["W_k"],
        value__weight=g["W_v"],
        output__weight=g["W_o"],
    )
    attend = xp.expand_dims(g["attend"], axis=1)
    output = layer(g["query"], mask=attend, cache=KeyAndValue(g["key"], g["value"]))
    assert_close(output, g["output"], tolerance=TOLERANCE)
    assert_close(layer.weights(g["query"], g["key"], mask=attend), g["weights"], tolerance=TOLERANCE)


def test_feed_forward(xp, init):
    g = golden("feed_forward", xp)
    layer = with_weights(
        FeedForward(8, 32, init=init),
        expand__weight=g["W_1"],
        expand__bias=g["b_1"],
        contract__weight=g["W_2"],
        contract__bias=g["b_2"],
    )
    assert_close(layer(g["x"]), g["output"], tolerance=TOLERANCE)


def test_layer_norm(xp, init):
    g = golden("layer_norm", xp)
    layer = with_weights(LayerNorm(16, epsilon=float(g["epsilon"]), init=init), weight=g["gamma"], bias=g["beta"])
    assert_close(layer(g["x"]), g["output"], tolerance=TOLERANCE)


def test_encoder_block(xp, init):
    g = golden("encoder_block", xp)
    layer = with_weights(
        EncoderLayer(
            16,
            int(g["num_heads"]),
            32,
            pre_norm=False,
            attention_bias=False,
            epsilon=float(g["epsilon"]),
            init=init,
        ),
        self_attention__query__weight=g["W_q"],
        self_attention__key__weight=g["W_k"],
        self_attention__value__weight=g["W_v"],
        self_attention__output__weight=g["W_o"],
        feed_forward__expand__weight=g["W_1"],
        feed_forward__expand__bias=g["b_1"],
        feed_forward__contract__weight=g["W_2"],
        feed_forward__contract__bias=g["b_2"],
        self_attention_residual__norm__weight=g["gamma_1"],
        self_attention_residual__norm__bias=g["beta_1"],
        feed_forward_residual__norm__weight=g["gamma_2"],
        feed_forward_residual__norm__bias=g["beta_2"],
    )
    attend = xp.expand_dims(g["attend"], axis=1)
    assert_close(layer(g["x"], mask=attend), g["output"], tolerance=TOLERANCE)
    assert_close(layer(g["x"]), g["output_unmasked"], tolerance=TOLERANCE)


def test_positions(xp):
    g = golden("positions_and_masks", xp)
    length, d_model = g["encoding"].shape
    table = sinusoidal(length, d_model, xp=xp, dtype=xp.float64)
    assert_close(table, g["encoding"], tolerance=TOLERANCE)
    later = sinusoidal(5, d_model, start=15, xp=xp, dtype=xp.float64)
    assert_close(later, g["encoding"][15:, :], tolerance=TOLERANCE)


def test_masks(xp):
    g = golden("positions_and_masks", xp)
    padding, causal = masks.padding(g["tokens"], int(g["pad_id"])), masks.causal(6, xp=xp)
    assert_close(padding, g["padding_attend"])
    assert_close(causal, g["look_ahead_attend"])
    assert_close(masks.combine(padding, causal), g["decoder_attend"])


def test_cross_entropy(xp):
    g = golden("cross_entropy", xp)
    pad_id = int(g["pad_id"])
    losses = cross_entropy(g["logits"], g["labels"], pad_id=pad_id)
    counted = xp.sum(xp.astype(g["labels"] != pad_id, xp.float64))
    assert_close(xp.sum(losses) / counted, g["loss"], tolerance=TOLERANCE)
