"""`xformer train-lm`: training on one text."""

from __future__ import annotations

import hashlib
import json

import numpy as np
import pytest

from tests.cli.conftest import events, write
from xformer.data.demo_tasks import numbers_task
from xformer.models import load

TEXT = 2 * ("\n".join(numbers_task(num_train=118, num_valid=1, num_test=1, largest=9999).train.source) + "\n")


def split(text):
    """Return the text and the last tenth of its characters."""
    return text[: int(len(text) * 0.9)], text[int(len(text) * 0.9) :]


RECIPE = """
task = "language_modeling"

[model]
d_model = 16
num_heads = 2
d_ff = 32
num_layers = 1

[training]
context_length = 12
batch_size = 4
validate_every = 4
max_steps = 6
warmup_steps = 20
"""


@pytest.fixture
def options(tmp_path):
    """The options of train-lm that name a text and a recipe."""
    write(tmp_path / "text", TEXT)
    write(tmp_path / "recipe.toml", RECIPE)
    return ["--text", tmp_path / "text", "--recipe", tmp_path / "recipe.toml"]


def test_the_default_model_is_one_of_transformers(xformer, tmp_path):
    """It computes the same there, and a changed field is named together with the nearest family."""
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    options = ["--text", write(tmp_path / "text", TEXT), "--max-steps", 1, "--batch-size", 2, "--context-length", 8]
    assert xformer("train-lm", *options, "--out", tmp_path / "run").code == 0
    assert xformer("export", tmp_path / "run", tmp_path / "checkpoint").code == 0
    ids = [[9, 5, 12, 7, 7, 20]]
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint")
    settings = model.generation_config  # a run samples
    assert (settings.do_sample, settings.temperature, settings.top_k) == (True, 0.8, 200)
    expected = model(torch.tensor(ids)).logits
    logits = load(tmp_path / "run" / "model.safetensors")(ids)[:, :, 4:]
    np.testing.assert_allclose(logits, expected.detach().numpy()[:, :, 4:], rtol=0, atol=1e-4)
    options += ["--set", "model.norm_position=sandwich"]
    assert xformer("train-lm", *options, "--out", tmp_path / "other").code == 0
    done = xformer("export", tmp_path / "other", tmp_path / "none")
    assert (done.code, len(done.err) < 200) == (2, True)
    assert "the nearest family is gpt_neox: norm_position is 'sandwich'; expected 'pre'\n" in done.err


def test_a_run_leaves_its_files_and_the_configuration_that_was_used(xformer, options, tmp_path):
    run = tmp_path / "run"
    done = xformer("train-lm", *options, "--out", run)
    assert (done.code, done.err) == (0, "")
    train, valid = split(TEXT)
    printed = f"training: {len(train):,} characters\nvalidation: {len(valid)} characters\n"
    assert all(words in done.out for words in (printed, "after step 6", "perplexity", f"generate --model {run}"))
    validations = [(event["step"], event["metric"], event["score"]) for event in events(run, "validation")]
    assert validations == [(4, None, None), (6, None, None)]
    config = json.loads((run / "config.json").read_text())
    assert config["task"] == config["recipe"]["task"] == "language_modeling"
    training = config["recipe"]["training"]
    assert (training["context_length"], training["batch_size"], training["valid_share"]) == (12, 4, None)
    assert not {"batch_tokens", "max_length", "truncation"} & training.keys()
    assert config["recipe"]["tokenizer"]["model"] == "characters"
    digest = hashlib.sha256(TEXT.encode()).hexdigest()
    assert config["data"] == {"text": {"path": str(tmp_path / "text"), "sha256": digest}}
    counts = {f"{name}_{unit}": len(part) for name, part in (("train", train), ("valid", valid))
              for unit in ("characters", "tokens")}  # fmt: skip
    assert config["counts"] == {**counts, "valid_tokens_unknown": 0}


# --- Bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("files", "more", "message"), [
    ({"text": b"one\nz\xe9ro\n"}, [], "text is not valid UTF-8: line 2"),
    ({"text": "a"}, [], "the training text has 1 tokens; expected at least 2"),
    ({}, ["--valid-share", 1.5], "error: --valid-share is 1.5; expected a number in (0, 1)"),
    ({}, ["--valid-share", 0.2, "--valid-text", "x"], "valid_text and valid_share are both given"),
    ({}, ["--valid-text", "nowhere"], "cannot read nowhere"),
    ({}, ["--set", "foo.x=1"], "'foo' in the options; expected one of init, model, tokenizer, training\n"),
    ({}, ["--set", "modle.d_ff=1"], "did you mean 'model'?\n"),
    ({"recipe.toml": "[training]\nbatch_tokens = 3"}, [], "unknown key 'batch_tokens' in [training] of {recipe}"),
    ({"recipe.toml": "[tokenizer]\nvocab_size = 9"}, [], "error: [tokenizer]: vocab_size is 9; expected at least"),
    ({"recipe.toml": "task = 'translation'"}, [],
     "task is 'translation' in {recipe}; expected language_modeling; use: xformer train"),
])  # fmt: skip
def test_bad_input(refused, options, tmp_path, files, more, message):
    for name, content in files.items():
        write(tmp_path / name, content)
    error = refused("train-lm", *options, *more, "--out", tmp_path / "run", untouched=tmp_path)
    assert message.format(recipe=tmp_path / "recipe.toml") in error
