"""The figures of the reference systems in tests/data, reproduced to 1e-12."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.conftest import assert_close
from tests.reference import small_parts, without_jax
from xformer import Initializer, Transformer, TransformerConfig, cross_entropy, masks
from xformer.backends import from_host
from xformer.layers import (
    Embedding,
    FeedForward,
    InputEmbedding,
    KVCache,
    LayerNorm,
    MaxScaledLayerNorm,
    MultiHeadAttention,
    Sinusoidal,
    sinusoidal,
)
from xformer.ops import attention, attention_weights, project_heads, softmax
from xformer.tree import replace

TOLERANCE = 1e-12
pytestmark = without_jax


def golden(name: str, xp: Any) -> dict[str, Any]:
    """Return the arrays of one file, in the library `xp`."""
    with np.load(Path(__file__).parent / "golden" / f"{name}.npz") as file:
        return {key: from_host(xp, file[key]) for key in file}


def with_weights(module: Any, **arrays: Any) -> Any:
    """Return the module with these parameters; `__` stands for the dot in their names."""
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


def attention_layer(g, names, num_heads, init):
    query, key, value, output = (g[name] for name in names)
    layer = MultiHeadAttention(query.shape[0], num_heads, bias=False, init=init)
    return with_weights(layer, query__weight=query, key__weight=key, value__weight=value, output__weight=output)


def test_multi_head_attention(xp, init):
    g = golden("multi_head_attention", xp)
    layer = attention_layer(g, ("W_q", "W_k", "W_v", "W_o"), int(g["num_heads"]), init)
    attend = xp.expand_dims(g["attend"], axis=1)
    # The reference system takes keys and values from two arrays; the layer attends to what it is handed in a store.
    store = KVCache(layer.keys_and_values(g["key"])[0], layer.keys_and_values(g["value"])[1])
    assert_close(layer.attend(g["query"], store, mask=attend), g["output"], tolerance=TOLERANCE)
    assert_close(layer.weights(g["query"], g["key"], mask=attend), g["weights"], tolerance=TOLERANCE)


def test_per_head_projections(xp, init):
    g = golden("per_head_projections", xp)
    for name in ("W_Q", "W_K", "W_V"):  # (heads, d_model, head_dim)
        g[name] = xp.reshape(xp.permute_dims(g[name], (1, 0, 2)), (g["W_O"].shape[1], -1))
    layer = attention_layer(g, ("W_Q", "W_K", "W_V", "W_O"), 3, init)
    x = xp.expand_dims(g["x"], axis=0)
    assert_close(layer(x)[0, ...], g["output"], tolerance=TOLERANCE)
    key, value = layer.keys_and_values(x)
    heads = attention(project_heads(x, (layer.query.weight, None, 3))[0], key, value)
    assert_close(heads[0, ...], g["heads"], tolerance=TOLERANCE)


def test_feed_forward(xp, init):
    g = golden("feed_forward", xp)
    layer = with_weights(
        FeedForward(8, 32, init=init),
        up__weight=g["W_1"],
        up__bias=g["b_1"],
        down__weight=g["W_2"],
        down__bias=g["b_2"],
    )
    assert_close(layer(g["x"]), g["output"], tolerance=TOLERANCE)


def test_layer_norm(xp, init):
    g = golden("layer_norm", xp)
    arrays, epsilon = {"weight": g["gamma"], "bias": g["beta"]}, float(g["epsilon"])
    plain = with_weights(LayerNorm(16, epsilon=epsilon, init=init), **arrays)
    assert_close(plain(g["x"]), g["output"], tolerance=TOLERANCE)
    scaled = with_weights(MaxScaledLayerNorm(16, epsilon=epsilon, init=init), **arrays)
    assert_close(scaled(g["x"]), g["stable_output"], tolerance=TOLERANCE)
    assert_close(scaled(g["x_large"]), g["stable_output_large"], tolerance=TOLERANCE)


def test_encoder_block(xp):
    g = golden("encoder_block", xp)
    layer = with_weights(
        small_parts(
            xp,
            d_model=16,
            num_heads=int(g["num_heads"]),
            d_ff=32,
            norm_position="post",
            attention_bias=False,
            norm_epsilon=float(g["epsilon"]),
        ).encoder_layer(),
        self_attention__query__weight=g["W_q"],
        self_attention__key__weight=g["W_k"],
        self_attention__value__weight=g["W_v"],
        self_attention__output__weight=g["W_o"],
        feed_forward__up__weight=g["W_1"],
        feed_forward__up__bias=g["b_1"],
        feed_forward__down__weight=g["W_2"],
        feed_forward__down__bias=g["b_2"],
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


def blog_names(g):
    """The parameters of the blog's Transformer under our names."""
    attention = {"W_q": "query.weight", "W_k": "key.weight", "W_v": "value.weight", "W_o": "output.weight"}
    feed_forward = {"W_1": "up.weight", "b1": "up.bias", "W_2": "down.weight", "b2": "down.bias"}
    sublayers = {
        "encoder": {"mha": "self_attention", "ffn": "feed_forward"},
        "decoder": {"mha1": "self_attention", "mha2": "cross_attention", "ffn": "feed_forward"},
    }
    for stack, parts in sublayers.items():
        for layer in ("0", "1"):
            for theirs, ours in parts.items():
                for theirs_array, ours_array in (feed_forward if theirs == "ffn" else attention).items():
                    yield f"{stack}.{layer}.{ours}.{ours_array}", g[f"{stack}.{layer}.{theirs}.{theirs_array}"]
    yield "source_embedding.weight", g["source_embedding"]
    yield "target_embedding.weight", g["target_embedding"]
    yield "output.weight", g["output_projection"]


def test_blog_transformer(xp):
    g = golden("blog_transformer", xp)
    config = TransformerConfig(
        source_vocab_size=11,
        target_vocab_size=13,
        d_model=16,
        num_heads=int(g["num_heads"]),
        d_ff=32,
        num_encoder_layers=2,
        num_decoder_layers=2,
        norm_position="post",
        norm_epsilon=float(g["epsilon"]),
        attention_bias=False,
        scale_embeddings=False,
        tie_output=False,
        pad_id=6,  # the blog masks no padding; no token here is 6
    )
    blank = Transformer(config, xp=xp, dtype="float64")
    model = replace(blank, dict(blank.named_parameters()) | dict(blog_names(g)))
    source, target = (one_hot(xp, g[name], size) for name, size in (("source", 11), ("target", 13)))
    for s, t in ((g["source"], g["target"]), (source, target)):
        assert_close(model(s, t), g["logits_causal"], tolerance=TOLERANCE)
        assert_close(model(s, t, causal=False), g["logits_no_mask"], tolerance=TOLERANCE)
        assert_close(model.encode(s), g["encoder_output"], tolerance=TOLERANCE)
        assert_close(model(s), g["encoder_only"], tolerance=TOLERANCE)


def one_hot(xp, ids, size):
    return xp.astype(xp.expand_dims(ids, axis=-1) == xp.arange(size), xp.float64)


def test_slides_embedding(xp, init):
    g = golden("slides", xp)
    table = with_weights(Embedding(30, 12, scale=False, init=init), weight=g["token_embedding"])
    norm = LayerNorm(12, epsilon=float(g["epsilon"]), init=init)
    embed = InputEmbedding(positions=Sinusoidal(12), scale=True, norm=norm)
    assert_close(embed(table(g["ids"])), g["embedded"], tolerance=TOLERANCE)


def test_slides_softmax_with_temperature(xp):
    g = golden("slides", xp)
    assert_close(softmax(g["scores"], temperature=0.5), g["softmax_temperature_0_5"], tolerance=TOLERANCE)
    assert_close(softmax(g["scores"], temperature=2.0), g["softmax_temperature_2"], tolerance=TOLERANCE)
