import json
import math
from pathlib import Path

import pytest

from xformer.errors import ConfigError
from xformer.runs.config import LanguageModelTrainingConfig, TextTokenizerConfig, TokenizerConfig, TrainingConfig
from xformer.runs.recipe import Recipe, read_tables

ROOT = Path(__file__).parents[2]
TABLES = {
    "model": {"d_model": 32, "num_heads": 4, "dropout": 0.3},
    "tokenizer": {"vocab_size": 500, "lowercase": True},
    "training": {"batch_tokens": 100, "max_minutes": 2, "seed": 7},
}


def test_what_is_left_out_has_a_default():
    assert Recipe.from_dict({}) == Recipe()
    sizes = {"d_model": 256, "num_heads": 4, "d_ff": 1024, "num_encoder_layers": 3, "num_decoder_layers": 3}
    assert Recipe().model == sizes
    recipe = Recipe.from_dict(TABLES)
    assert recipe.tokenizer == TokenizerConfig(vocab_size=500, lowercase=True)
    assert recipe.training == TrainingConfig(batch_tokens=100, max_minutes=2, seed=7)
    assert recipe.model == {**sizes, "d_model": 32, "dropout": 0.3}
    assert Recipe.from_dict(json.loads(json.dumps(recipe.to_dict()))) == recipe


def test_a_file(tmp_path):
    path = tmp_path / "recipe.toml"
    path.write_text("[model]\nd_model = 64\n[training]\nmax_steps = 10\nlearning_rate_factor = 2\n", encoding="utf-8")
    recipe = Recipe.from_toml(path)
    assert (recipe.model["d_model"], recipe.training.max_steps) == (64, 10)
    assert read_tables(path)["model"] == {"d_model": 64}


def test_mistakes_are_named_with_their_place():
    for tables, message in (
        ({"trainin": {}}, r"unknown key 'trainin' in here; did you mean 'training'"),
        ({"training": {"max_updates": 3}}, r"unknown key 'max_updates' in .* of here; did you mean 'max_steps'"),
        ({"model": {"d_model": 30}}, r"\[model\] of here: d_model 30 is not divisible by num_heads 4"),
        ({"model": 3}, r"'model' in here is 3; expected a table \[model\]"),
        ({"tokenizer": {"joint": 1}}, r"\[tokenizer\] of here: joint is 1; expected true or false"),
        ({"training": {"seed": True}}, r"\[training\] of here: seed is True; expected an integer of at least 0"),
        ({"training": {"max_grad_norm": 0}}, r"\[training\] of here: max_grad_norm is 0; expected a number above 0"),
        ({"d_model": 3}, r"'d_model' in here is outside the tables; expected it under \[model\]"),
        ({"task": "language_modeling", "context_length": 3}, r"'context_length' .* expected it under \[training\]"),
        ({"training": {"optimizer": []}}, r"\[training\] of here: optimizer is \[\]; expected one of 'adam', 'adamw'"),
        ({"training": {"optimizer": "sgd", "beta1": 0.5}},
         r"\[training\] of here: beta1 is 0.5; optimizer 'sgd' has none; choose 'adam', 'adamw' or 'muon'"),
        ({"training": {"schedule": "cosine", "max_steps": 9, "min_learning_rate": 0.1}},
         r"\[training\] of here: min_learning_rate is 0.1, above the peak of 0.00255"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=message):
            Recipe.from_dict(tables, "here")


def test_settings_out_of_range():
    for name, value in {
        "batch_tokens": 0, "warmup_steps": 0, "validate_every": 0, "max_length": 0, "max_steps": 0, "seed": -1,
        "max_minutes": math.nan, "learning_rate_factor": 0.0, "label_smoothing": 1.0, "max_grad_norm": 0.0,
        "metric_for_best": "chrf", "truncation": "trim", "dtype": "float16", "precision": "float64",
        "data_parallel": -1, "learning_rate": math.nan, "min_learning_rate": -1.0, "beta1": 1.0, "beta2": -0.1,
        "epsilon": 0.0, "momentum": 1.0, "weight_decay": -0.1, "z_loss": math.inf,
        "grad_accumulation": 0, "patience": 0, "keep_checkpoints": -1, "checkpoint_every": 0, "average": "first",
    }.items():  # fmt: skip
        with pytest.raises(ConfigError, match=f"{name} is {value!r}; expected"):
            TrainingConfig(**{name: value})


def test_averaging_needs_something_to_average():
    with pytest.raises(ConfigError, match=r"average is 'last', but keep_checkpoints is 0; expected the number"):
        TrainingConfig(average="last")
    with pytest.raises(ConfigError, match=r"checkpoint_every is 30; average 'best' needs the score of each, so .* 20"):
        TrainingConfig(average="best", keep_checkpoints=3, checkpoint_every=30, validate_every=20)
    for every in (None, 20, 40):
        settings = TrainingConfig(average="best", keep_checkpoints=3, checkpoint_every=every, validate_every=20)
        assert settings.checkpoint_interval == (every or 20)
    assert TrainingConfig(average="last", keep_checkpoints=3, checkpoint_every=7).checkpoint_interval == 7


@pytest.mark.parametrize(("model", "message"), [
    ({"num_decoder_layers": 0}, r"\[model\] of the recipe: num_decoder_layers is 0; expected at least 1"),
    ({"positions": "learned", "max_positions": 256}, "max_length is 256; expected at most 255, since positions are"),
    ({"pad_id": 1}, "unknown key 'pad_id'"),
])  # fmt: skip
def test_models_that_could_not_be_trained_are_refused(model, message):
    with pytest.raises(ConfigError, match=message):
        Recipe.from_dict({"model": model})


@pytest.mark.parametrize(
    ("training", "expected"),
    [
        ({}, 20),
        ({"max_steps": 1}, 1),
        ({"max_steps": 59}, 5),
        ({"max_steps": 5000}, 20),
        ({"max_steps": 50, "warmup_steps": 40}, 40),
    ],
)
def test_warm_up_from_a_checkpoint_is_short(training, expected):
    """A tenth of the steps, and no more than 20: a new model has 600 steps."""
    recipe = Recipe.from_dict({"init": {"path": "somewhere"}, "training": training}).for_data(100)
    assert recipe.training.warmup_steps == expected


def test_a_language_model_has_settings_of_its_own():
    recipe = Recipe.from_dict({"task": "language_modeling", "training": {"context_length": 32}})
    assert recipe.training == LanguageModelTrainingConfig(context_length=32)
    assert (recipe.training.label_smoothing, recipe.training.metric_for_best) == (0.0, "loss")
    assert recipe.tokenizer == TextTokenizerConfig()
    sizes = {"d_model": 256, "num_heads": 4, "d_ff": 1024, "num_layers": 4}
    assert recipe.model == {**sizes, "positions": "rotary", "scale_embeddings": False}
    assert Recipe.from_dict(json.loads(json.dumps(recipe.to_dict()))) == recipe
    learned = {"positions": "learned", "max_positions": 32}
    assert Recipe.from_dict({**recipe.to_dict(), "model": learned}).model["max_positions"] == 32


def test_what_a_language_model_does_not_have_is_refused():
    for tables, message in (
        ({"training": {"batch_tokens": 3}}, r"unknown key 'batch_tokens' in \[training\] of here"),
        ({"training": {"batch_size": 0}}, r"batch_size is 0; expected at least 1"),
        ({"training": {"valid_share": 1.0}}, r"valid_share is 1.0; expected a number in \(0, 1\)"),
        ({"training": {"metric_for_best": "score"}}, r"metric_for_best is 'score'; expected one of 'loss'"),
        ({"tokenizer": {"model": "words"}},
         r"\[tokenizer\] of here: model is 'words'; expected one of 'bpe', 'characters'"),
        ({"model": {"copy": True}}, r"unknown key 'copy' in \[model\] of here"),
        ({"model": {"positions": "learned", "max_positions": 9}}, r"context_length is 128; expected at most 9, since"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=message):
            Recipe.from_dict({"task": "language_modeling", **tables}, "here")


@pytest.mark.parametrize("path", sorted((ROOT / "docs" / "recipes").glob("*.toml")), ids=lambda path: path.stem)
def test_recipes_of_the_documentation_are_recipes(path):
    assert Recipe.from_toml(path).training.max_steps
