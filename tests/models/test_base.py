"""A saved model loads unchanged in any library; other files raise a one-line error."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
import pytest

from tests.conftest import assert_close, library_or_skip
from tests.reference import (
    KINDS,
    SOURCE,
    TARGET,
    for_each,
    model_of_kind,
    raises_line,
    small_language_model,
    small_model,
)
from xformer import LanguageModel, LanguageModelConfig, Transformer
from xformer.backends import dtype_name, resolve, to_host
from xformer.errors import CheckpointError, ConfigError, describe_type
from xformer.io import load_arrays, save_arrays
from xformer.models.base import load
from xformer.tree import flatten

SETTINGS = {"norm_position": "post", "output_bias": True, "tie_output": False, "num_encoder_layers": 1, "dropout": 0.2}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.safetensors"


def dtypes(model):
    return {dtype_name(array.dtype) for array in flatten(model)[0]}


def test_save_and_load_are_the_identity(xp, path):
    model = small_model(xp, **SETTINGS)
    model.save(path)
    expected = dict(small_model(**SETTINGS).named_parameters())
    for namespace in (xp, resolve("numpy")):
        loaded = Transformer.load(path, xp=namespace)
        assert loaded.config == model.config
        assert dict(loaded.named_parameters()).keys() == expected.keys()
        for name, array in loaded.named_parameters():
            assert_close(array, expected[name], xp=namespace, tolerance=0.0)


@for_each("kind", KINDS)
def test_save_and_load_of_every_variant(path, kind):
    model = model_of_kind(kind)
    model.save(path)
    loaded = Transformer.load(path, xp="numpy")
    assert loaded.config == model.config
    expected, found = (dict(each.named_parameters()) for each in (model, loaded))
    assert found.keys() == expected.keys()
    for name, array in found.items():
        assert_close(array, expected[name], tolerance=0.0)
    assert_close(loaded(SOURCE, TARGET), model(SOURCE, TARGET), tolerance=0.0)


def test_the_saved_dtype_is_the_default(path):
    small_model(dtype="float64").save(path)
    assert dtypes(Transformer.load(path, xp="numpy")) == {"float64"}
    assert dtypes(Transformer.load(path, xp="numpy", dtype="float32")) == {"float32"}


def test_bfloat16_is_kept_if_the_library_has_it(path):
    torch = library_or_skip("torch")
    model = small_model(torch, dtype="bfloat16")
    model.save(path)
    loaded = Transformer.load(path, xp=torch)
    assert dtypes(loaded) == {"bfloat16"}
    assert_close(loaded(SOURCE, TARGET), model(SOURCE, TARGET), tolerance=0.0)
    host = Transformer.load(path, xp="numpy")
    assert dtypes(host) == {"float32"}
    for array, expected in zip(flatten(host)[0], flatten(model)[0], strict=True):
        assert_close(array, to_host(expected), tolerance=0.0)
    assert dtypes(Transformer.load(path, xp=torch, dtype="float64")) == {"float64"}


def test_load_draws_no_parameters(path, monkeypatch):
    model = small_model()
    model.save(path)
    for name in ("normal", "uniform"):
        monkeypatch.setattr(f"xformer.random.Rng.{name}", None)
    assert_close(Transformer.load(path)(SOURCE, TARGET), model(SOURCE, TARGET), tolerance=0.0)


def test_arrays_that_are_not_floating_keep_their_dtype(xp, path):
    class Permuted(LanguageModel):
        order: Any

        def __init__(self, config, **keywords):
            super().__init__(config, **keywords)
            self.order = resolve(keywords.get("xp", "numpy")).asarray([2, 0, 1])

    model = Permuted(LanguageModelConfig(vocab_size=7, d_model=8, num_heads=2, d_ff=8, num_layers=1), xp=xp)
    model.save(path)
    loaded = load(path, xp=xp, dtype="float64" if xp.__name__ != "mlx.core" else None)
    assert dtype_name(loaded.order.dtype) == dtype_name(model.order.dtype)
    assert to_host(loaded.order).tolist() == [2, 0, 1]
    assert loaded.parameter_count() == model.parameter_count()


def test_load_reads_a_model_of_any_class(path):
    model = small_language_model()
    model.save(path)
    assert isinstance(load(path), type(model))
    with raises_line(CheckpointError, r"contains the model LanguageModel; use LanguageModel\.load\(path\)"):
        Transformer.load(path)
    arrays, metadata = load_arrays(path)
    save_arrays(path, arrays, {**metadata, "model": "OtherModel"})
    with raises_line(CheckpointError, "contains the model OtherModel, which is not defined; import its class first"):
        load(path)


def test_files_without_a_model_are_refused(path):
    with raises_line(CheckpointError, r"cannot read .*model\.safetensors: No such file or directory"):
        Transformer.load(path, xp="numpy")
    with raises_line(CheckpointError, r"is a directory; load a public checkpoint or a run with xformer\.load"):
        Transformer.load(path.parent, xp="numpy")
    path.write_bytes(b"")
    with raises_line(CheckpointError, "is not a valid safetensors file"):
        Transformer.load(path, xp="numpy")
    save_arrays(path, {"weight": np.zeros(3)}, {"format": "pt"})
    with raises_line(CheckpointError, "is a safetensors file without the configuration of an xformer model"):
        Transformer.load(path, xp="numpy")


@for_each(
    "change, message",
    [
        (lambda arrays, config: arrays.pop("encoder_norm.bias"), r"missing \['encoder_norm\.bias'\]"),
        (lambda arrays, config: arrays.update(extra=np.zeros(3)), r"unknown \['extra'\]"),
        (lambda arrays, config: arrays.update({"encoder_norm.bias": np.zeros(3)}), r"encoder_norm\.bias has shape"),
        (lambda arrays, config: config.update(d_ff=11), r"has shape \(8, 12\); expected \(8, 11\)"),
        (lambda arrays, config: config.update(num_heads=3), "d_model 8 is not divisible by num_heads 3"),
        (lambda arrays, config: config.update(d_model=None), "d_model is None"),
        (lambda arrays, config: config.update(rotary=True), "unknown key 'rotary' in configuration"),
        (lambda arrays, config: config.clear(), "configuration requires source_vocab_size"),
    ],
)
def test_arrays_must_match_the_configuration(path, change, message):
    small_model().save(path)
    arrays, metadata = load_arrays(path)
    config = json.loads(metadata["config"])
    change(arrays, config)
    save_arrays(path, arrays, {**metadata, "config": json.dumps(config)})
    with raises_line(CheckpointError, rf"does not contain the model of its configuration: .*{message}"):
        Transformer.load(path, xp="numpy")


@for_each("config", ["[1]", "null", "{", "3"])
def test_invalid_configurations_are_refused(path, config):
    save_arrays(path, {}, {"format": "xformer", "config": config})
    with raises_line(CheckpointError, "does not contain the model of its configuration"):
        Transformer.load(path, xp="numpy")


@for_each("config", [{"vocab_size": 9}, None, LanguageModelConfig(vocab_size=9)])
def test_configurations_of_other_classes_are_refused(config):
    received = describe_type(config)
    with raises_line(ConfigError, rf"^Transformer got {received} as config; expected TransformerConfig\(\.\.\.\)$"):
        Transformer(config)


@for_each(
    "keywords, message",
    [
        ({"input_ids": SOURCE}, "Transformer got an unknown argument 'input_ids'; did you mean 'source'?"),
        ({"decoder_input_ids": TARGET}, "unknown argument 'decoder_input_ids'; did you mean 'target'?"),
        ({"attention_mask": SOURCE}, "(attention_mask != 0)[:, None, None, :] as mask or source_mask"),
        ({"labels": TARGET}, "unknown argument 'labels'; compute the loss from the output"),
        ({"past_key_values": None}, "unknown argument 'past_key_values'; to decode with a cache, use xf.generate"),
        ({"position_ids": SOURCE}, "unknown argument 'position_ids'; positions are computed from the padding"),
        ({"tgt_mask": SOURCE}, "unknown argument 'tgt_mask'; did you mean 'causal'?"),
    ],
)
def test_arguments_of_hugging_face_models_get_a_hint(keywords, message):
    arguments = () if "input_ids" in keywords else (SOURCE,)
    with raises_line(ConfigError, re.escape(message)):
        small_model()(*arguments, **keywords)
