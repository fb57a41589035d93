"""The decoder-only model: equal to torch's layers, causal, and the same with a cache."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from tests.conftest import assert_close
from tests.reference import (
    encoder_layer_arrays,
    few_on_jax,
    for_each,
    gradients,
    norm_arrays,
    normal,
    prefixed,
    raises_line,
    randomize,
    small_language_model,
    values,
)
from xformer import masks, value_and_grad
from xformer.backends import resolve, to_host
from xformer.backends.numpy import NumpyLibrary
from xformer.errors import ConfigError, DataError
from xformer.models.config import POSITIONS
from xformer.training import TextChunks, language_model_loss
from xformer.tree import replace

TOKENS = np.asarray([[5, 4, 7, 9, 3], [1, 12, 6, 0, 0]])
TABLES = {"embedding.weight": "embedding", "input.positions.weight": "positions"}
TYPES = ("full_attention", "sliding_attention")
KINDS = [
    {},
    {"positions": "learned", "max_positions": 8, "tie_output": False, "norm_position": "post"},
    {"positions": "rotary", "norm": "rms", "activation": "swiglu", "num_key_value_heads": 1, "output_bias": True},
    {
        "positions": "alibi",
        "window": 3,
        "embedding_scale": 3.0,
        "residual_scale": 0.5,
        "logits_scale": 0.25,
        "layer_scale": True,
    },
    {"positions": "relative", "rematerialize": True},
    {"positions": "rotary", "layers_without_positions": (0,), "num_layers": 2, "window": 3, "layer_types": TYPES},
    {"positions": "rotary", "parallel_residual": True, "shared_norm": True},
    {"positions": "rotary", "norm_position": "output", "qk_norm": True, "qk_norm_all_heads": True},
    {"num_experts": 3, "expert_d_ff": 5, "activation": "swiglu", "num_layers": 2, "dense_layers": (0,)},
]


def test_a_derivative_copies_masks_and_angles_once_for_all_layers(monkeypatch):
    def copies(num_layers):
        kept: list = []
        monkeypatch.setattr(NumpyLibrary, "keep", lambda self, array: kept.append(array) or (array, None))
        model = small_language_model(positions="rotary", num_layers=num_layers, vocab_size=9)
        value_and_grad(lambda model: np.float64(1.0) * model(np.asarray([[3, 4, 0], [5, 6, 7]]))[0, 0, 0])(model)
        return len(kept)

    assert copies(4) == copies(1)


def test_logits_equal_those_of_torch():
    torch = pytest.importorskip("torch", reason="torch is what it is compared with")
    layer = torch.nn.TransformerEncoderLayer(
        8, 2, 12, dropout=0.0, activation="gelu", batch_first=True, norm_first=True, dtype=torch.float64
    )
    norm = torch.nn.LayerNorm(8, dtype=torch.float64)
    theirs = randomize(torch.nn.TransformerEncoder(layer, 2, norm, enable_nested_tensor=False))
    model = small_language_model(activation="gelu")
    arrays = prefixed("norm", norm_arrays(theirs.norm, values)) | {"embedding.weight": model.embedding.weight}
    for index, part in enumerate(theirs.layers):
        arrays |= prefixed(f"layers.{index}", encoder_layer_arrays(part, values))
    model = replace(model, arrays)
    x = model.input(model.embedding(TOKENS[:1]))
    future = torch.tensor(~masks.causal(5, xp="numpy"))
    expected = theirs(torch.tensor(x), mask=future).detach().numpy() @ model.embedding.weight.T
    assert_close(model(TOKENS[:1]), expected)


def test_loss_and_gradients_of_a_training_step_equal_those_of_torch():
    torch = pytest.importorskip("torch", reason="torch is what it is compared with")
    settings = {"dropout": 0.0, "activation": "gelu", "batch_first": True, "norm_first": True, "dtype": torch.float64}
    layer = torch.nn.TransformerEncoderLayer(8, 2, 12, **settings)
    theirs = torch.nn.ModuleDict(
        {
            "embedding": torch.nn.Embedding(13, 8, dtype=torch.float64),
            "positions": torch.nn.Embedding(6, 8, dtype=torch.float64),
            "layers": torch.nn.TransformerEncoder(
                layer, 2, torch.nn.LayerNorm(8, dtype=torch.float64), enable_nested_tensor=False
            ),
        }
    )
    randomize(theirs)

    def arrays(of):
        found = {name: of(theirs[part].weight) for name, part in TABLES.items()}
        found |= prefixed("norm", norm_arrays(theirs["layers"].norm, of))
        for index, part in enumerate(theirs["layers"].layers):
            found |= prefixed(f"layers.{index}", encoder_layer_arrays(part, of))
        return found

    model = replace(small_language_model(activation="gelu", positions="learned", max_positions=6), arrays(values))
    text = np.asarray([5, 4, 0, 9, 3, 1, 12, 6, 2, 7, 0, 8])  # pad_id 0 is a token like any other here
    windows = TextChunks.make(text, [0, 6], 5, xp=resolve("numpy"))
    loss, found = value_and_grad(lambda model: language_model_loss(model, windows) / 10)(model)

    tokens, labels = torch.tensor(windows.tokens), torch.tensor(windows.labels)
    x = theirs["embedding"](tokens) * 8**0.5 + theirs["positions"].weight[:5]
    y = theirs["layers"](x, mask=torch.triu(torch.ones(5, 5, dtype=torch.bool), 1))
    expected = torch.nn.functional.cross_entropy((y @ theirs["embedding"].weight.T).flatten(0, 1), labels.flatten())
    expected.backward()
    assert float(loss) == pytest.approx(expected.item(), rel=1e-12)
    reference = arrays(gradients)
    assert {name for name, _ in found.named_parameters()} == reference.keys()
    for name, gradient in found.named_parameters():
        assert_close(gradient, reference[name], tolerance=1e-10)


@few_on_jax("settings", [(each,) for each in KINDS], on_jax=[(KINDS[2],), (KINDS[4],)])
def test_cached_decoding_equals_the_full_model(xp, settings):
    model = small_language_model(xp, **settings)
    tokens = xp.asarray(TOKENS[:, :3])
    full, cache = model(tokens), model.init_cache(2)
    for start, stop in ((0, 2), (2, 3)):
        assert_close(model.decode_step(tokens[:, start:stop], cache), full[:, stop - 1, :])
    cache.reorder([1, 0, 1])
    again = xp.take(tokens, xp.asarray([1, 0, 1]), axis=0)
    longer = xp.concat([again, again[:, :1]], axis=1)
    assert_close(model.decode_step(longer[:, 3:], cache), model(longer)[:, 3, :])


@for_each("settings", KINDS)
def test_padding_and_later_tokens_change_no_logits(settings):
    model = small_language_model(**settings)
    expected = model([[1, 12, 6]])[0]
    np.testing.assert_allclose(model(TOKENS)[1, :3], expected, atol=1e-12)
    np.testing.assert_allclose(model([[0, 0, 1, 12, 6]])[0, 2:], expected, atol=1e-12)
    np.testing.assert_allclose(model([[1, 12, 7]])[0, :2], expected[:2], atol=1e-12)


def test_invalid_inputs_are_refused():
    model = small_language_model()
    with raises_line(DataError, "token ids range from 3 to 13; expected 0 to 12"):
        model([[3, 13]])
    with raises_line(ConfigError, "batch_size is 0; expected an integer of at least 1"):
        model.init_cache(0)


@few_on_jax(
    "positions,types", itertools.product(POSITIONS, [None, TYPES]), on_jax=[("rotary", TYPES), ("relative", None)]
)
def test_a_static_cache_with_windows_equals_a_growing_one(xp, positions, types):
    local = {"rope_local_theta": 100.0} if positions == "rotary" else {}
    settings = {"window": 3, "num_layers": 2, "layer_types": types, "positions": positions, **local}
    model = small_language_model(**settings).to(xp)
    tokens = model.token_ids(np.random.default_rng(0).integers(1, 13, (2, 6)))
    cache = model.init_cache(2)
    model.decode_step(tokens[:, :2], cache)
    static = model.to_static(cache, 7)
    for i in range(2, 6):
        expected = model.decode_step(tokens[:, i : i + 1], cache)
        assert_close(model.decode_step(tokens[:, i : i + 1], static), expected, xp=xp)


@for_each("positions", ["rotary", "alibi", "relative"])
def test_layers_without_positions_do_not_see_the_order(xp, positions):
    settings = {"positions": positions, "num_layers": 1, "tie_output": False}
    with_positions = small_language_model(xp, **settings)
    without = replace(
        small_language_model(xp, **settings, layers_without_positions=(0,)), dict(with_positions.named_arrays())
    )
    for model, is_ordered in ((with_positions, True), (without, False)):
        one, other = (model([tokens])[0, -1, :] for tokens in ([5, 4, 7, 9], [7, 5, 4, 9]))
        assert is_ordered == (float(np.max(np.abs(to_host(one) - to_host(other)))) > 1e-6)
        if not is_ordered:
            assert_close(one, other)


def test_embeddings_and_logits_are_scaled(xp):
    plain = small_language_model(xp, scale_embeddings=True)
    one_hot = xp.asarray(np.eye(13)[TOKENS])
    for settings in ({"embedding_scale": 3.0}, {"scale_embeddings": False, "embedding_scale": 3.0 * 8**0.5}):
        scaled = small_language_model(xp, **settings)
        assert_close(scaled.embedding(xp.asarray(TOKENS)), 3.0 * plain.embedding(xp.asarray(TOKENS)))
        assert_close(scaled.embedding(one_hot), 3.0 * plain.embedding(one_hot))
    scaled = small_language_model(xp, logits_scale=0.25, output_bias=True)
    arrays = dict(scaled.named_arrays()) | {"output_bias": xp.asarray(normal(0, 13))}
    expected = 0.25 * (plain(TOKENS) + arrays["output_bias"])
    assert_close(replace(scaled, arrays)(TOKENS), expected)


def test_layers_with_a_window_rotate_the_same_fraction():
    model = small_language_model(positions="rotary", window=3, rope_local_theta=100.0, rotary_fraction=0.5)
    assert (model.positions.features, model.local_positions.features) == (2, 2)


@for_each("sizes", [(4,), (1, 3), (3, 1)])
def test_all_logits_are_a_choice_of_the_call(xp, sizes):
    model = small_language_model(xp)
    tokens = xp.asarray(np.asarray([[5, 4, 7, 9], [3, 8, 6, 2]]))
    full = model(tokens)
    for has_all in (False, True):
        cache, start = model.init_cache(2), 0
        for size in sizes:
            end = start + size
            logits = model.decode_step(tokens[:, start:end], cache, all_logits=has_all)
            assert_close(logits, full[:, start:end, :] if has_all else full[:, end - 1, :], xp=xp)
            cache, start = model.to_static(cache, 8), end


@for_each("lengths", [None, [2, 1]])
def test_a_full_static_cache_raises(lengths):
    model = small_language_model()
    cache = model.init_cache(2)
    model.decode_step(np.asarray([[5, 4], [3, 0]]), cache, None if lengths is None else np.asarray(lengths))
    static = model.to_static(cache, 4)
    for _ in range(2):
        model.decode_step(np.asarray([[5], [6]]), static)
    with raises_line(ConfigError, r"the cache is full: it holds 4 tokens; use model.to_static\(cache, max_length\)"):
        model.decode_step(np.asarray([[5], [6]]), static)
    model.decode_step(np.asarray([[5], [6]]), model.to_static(static, 5))


def test_a_static_cache_is_linear_in_its_capacity():
    for positions in ("alibi", "relative", "rotary"):
        model = small_language_model(positions=positions)
        cache = model.init_cache(1)
        model.decode_step(np.asarray([[5, 4]]), cache)
        size, large = (
            sum(array.size for array in model.to_static(cache, capacity).arrays() if array is not None)
            for capacity in (512, 2048)
        )
        assert large < 4.1 * size


def test_scaled_positions_depend_on_the_length_of_their_own_row_only():
    """Longrope changes the wavelengths of texts with more than 8 tokens."""
    features = small_language_model(positions="rotary").positions.features
    scaling = {
        "rope_type": "longrope",
        "short_factor": [1.0] * (features // 2),
        "long_factor": [7.0] * (features // 2),
        "original_max_position_embeddings": 8,
        "factor": 4.0,
    }
    model = small_language_model(positions="rotary", rope_scaling=scaling, dtype="float64")
    rows = [[5, 4, 3], [3, 4, 5, 6, 7, 8, 9, 3, 4, 5, 6]]
    further = np.random.default_rng(0).integers(3, 13, (2, 12))
    expected = []
    for row, tokens in zip(rows, further, strict=True):
        cache = model.init_cache(1)
        logits = [model.decode_step(np.asarray([row]), cache)]
        logits += [model.decode_step(np.asarray([[token]]), cache) for token in tokens]
        expected.append(np.concatenate(logits))
    cache = model.init_cache(2)
    found = [model.decode_step(np.asarray([[*rows[0], *[0] * 8], rows[1]]), cache, np.asarray([3, 11]))]
    for capacity in (24, 64):
        static = model.to_static(cache, capacity)
        logits = [*found, *(model.decode_step(tokens[:, None], static) for tokens in further.T)]
        np.testing.assert_allclose(np.stack(logits, axis=1), expected, rtol=1e-9)
