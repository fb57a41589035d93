"""The decoder-only model: equal to torch's layers, causal, and the same with a cache."""

from __future__ import annotations

import numpy as np
import pytest

from tests.conftest import assert_close
from tests.reference import (
    encoder_layer_arrays,
    norm_arrays,
    normal,
    prefixed,
    raises_line,
    randomize,
    small_language_model,
    values,
    weighted_sum,
)
from xformer import LanguageModel, Transformer, grad, masks
from xformer.errors import CheckpointError, ConfigError, DataError
from xformer.tree import flatten, replace

TOKENS = np.asarray([[5, 4, 7, 9, 3], [1, 12, 6, 0, 0]])
WEIGHTS = normal(0, 2, 5, 13)
KINDS = [
    {},
    {"positions": "learned", "max_positions": 8, "tie_output": False, "norm_position": "post"},
    {"positions": "rotary", "norm": "rms", "activation": "swiglu", "num_key_value_heads": 1, "output_bias": True},
    {"positions": "alibi", "window": 3},
    {"positions": "relative", "rematerialize": True},
]


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


@pytest.mark.parametrize("settings", KINDS)
def test_steps_with_a_cache_give_what_the_whole_gives(xp, settings):
    model = small_language_model(xp, **settings)
    tokens = xp.asarray(TOKENS[:, :3])
    whole, cache = model(tokens), model.begin(2)
    for start, stop in ((0, 2), (2, 3)):
        assert_close(model.step(tokens[:, start:stop], cache), whole[:, stop - 1, :])
    cache.select([1, 0, 1])
    again = xp.take(tokens, xp.asarray([1, 0, 1]), axis=0)
    longer = xp.concat([again, again[:, :1]], axis=1)
    assert_close(model.step(longer[:, 3:], cache), model(longer)[:, 3, :])


@pytest.mark.parametrize("settings", KINDS)
def test_padding_is_invisible_and_the_future_hidden(settings):
    model = small_language_model(**settings)
    expected = model([[1, 12, 6]])[0]
    np.testing.assert_allclose(model(TOKENS)[1, :3], expected, atol=1e-12)
    np.testing.assert_allclose(model([[0, 0, 1, 12, 6]])[0, 2:], expected, atol=1e-12)
    np.testing.assert_allclose(model([[1, 12, 7]])[0, :2], expected[:2], atol=1e-12)


def test_rematerialization_changes_no_gradient():
    plain, again = (small_language_model(rematerialize=flag) for flag in (False, True))
    found = [grad(lambda model: weighted_sum(model(TOKENS), WEIGHTS))(model) for model in (plain, again)]
    for one, other in zip(*(flatten(tree)[0] for tree in found), strict=True):
        assert_close(one, other, tolerance=1e-14)


def test_save_and_load_are_the_identity(tmp_path):
    model = small_language_model(positions="learned", max_positions=9)
    model.save(tmp_path / "m.safetensors")
    loaded = LanguageModel.load(tmp_path / "m.safetensors", xp="numpy")
    assert loaded.config == model.config
    assert_close(loaded(TOKENS), model(TOKENS), tolerance=0.0)
    with raises_line(CheckpointError, "holds a LanguageModel; expected a Transformer"):
        Transformer.load(tmp_path / "m.safetensors", xp="numpy")


def test_what_it_refuses():
    model = small_language_model()
    with raises_line(DataError, "token ids range from 3 to 13; expected 0 to 12"):
        model([[3, 13]])
    with raises_line(ConfigError, "rows is 0; expected at least 1"):
        model.begin(0)
