"""`xformer train-lm`: a run on one text, by the same request and loop as `train`."""

from __future__ import annotations

import hashlib
import json
import shutil
import signal

import numpy as np
import pytest

from tests.cli.test_train import events, state, wait_for_state, write
from xformer.cli.training_text import split
from xformer.io import load_arrays
from xformer.models import LanguageModel
from xformer.text import numbers_task
from xformer.training import LanguageModelTask, RunDirectory

TEXT = 2 * ("\n".join(numbers_task(num_train=118, num_valid=1, num_test=1, largest=9999).train.source) + "\n")
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
max_updates = 6
warmup_steps = 20
"""


@pytest.fixture
def options(tmp_path):
    """The options of train-lm that name a text and a recipe."""
    write(tmp_path / "text", TEXT)
    write(tmp_path / "recipe.toml", RECIPE)
    return ["--text", tmp_path / "text", "--recipe", tmp_path / "recipe.toml"]


@pytest.fixture
def run(xformer, options, tmp_path):
    """A run of six updates."""
    assert xformer("train-lm", *options, "--out", tmp_path / "run").code == 0
    return tmp_path / "run"


def test_a_run_leaves_its_files_and_says_what_is_next(xformer, options, tmp_path):
    done = xformer("train-lm", *options, "--out", tmp_path / "run")
    assert (done.code, done.err) == (0, "")
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [
        "config.json",
        "last.safetensors",
        "log.jsonl",
        "model.safetensors",
        "tokenizer.json",
    ]
    train, valid = split(TEXT, 0.1)
    assert f"training: {len(train):,} characters\nvalidation: {len(valid)} characters\n" in done.out
    assert "validation after update 6" in done.out
    assert "perplexity" in done.out
    assert f"generate --model {tmp_path / 'run'}" in done.out
    found = events(tmp_path / "run", "validation")
    assert [event["step"] for event in found] == [4, 6]
    assert {(event["metric"], event["score"]) for event in found} == {(None, None)}


def test_the_configuration_is_what_was_really_used(run, tmp_path):
    config = json.loads((run / "config.json").read_text())
    assert (config["kind"], config["task"], config["recipe"]["task"]) == ("train-lm", *["language_modeling"] * 2)
    training = config["recipe"]["training"]
    assert (training["context_length"], training["batch_size"], training["valid_share"]) == (12, 4, 0.1)
    assert not {"batch_tokens", "max_length", "truncation"} & training.keys()
    assert (training["label_smoothing"], training["metric_for_best"]) == (0.0, "loss")
    assert config["recipe"]["tokenizer"]["model"] == "characters"
    digest = hashlib.sha256(TEXT.encode()).hexdigest()
    assert config["data"] == {"text": {"path": str(tmp_path / "text"), "sha256": digest}}
    train, valid = split(TEXT, 0.1)
    assert config["counts"] == {
        "train_characters": len(train),
        "train_tokens": len(train),
        "valid_characters": len(valid),
        "valid_tokens": len(valid),
        "valid_tokens_unknown": 0,
    }


def test_the_best_model_has_the_loss_that_was_reported(run):
    model = LanguageModel.load(run / "model.safetensors", xp=np)
    ids = RunDirectory(run).load_tokenizer("joint").encode_text(split(TEXT, 0.1)[1])
    task = LanguageModelTask(model, ids, ids, context_length=12, batch_size=4)
    loss = sum(float(task.loss(model, batch)) for batch in task.validation_batches()) / (len(ids) - 1)
    assert loss == pytest.approx(min(event["loss"] for event in events(run, "validation")), rel=1e-5)


def test_a_text_for_validation(xformer, options, tmp_path):
    valid = write(tmp_path / "valid", "one hundred QUX\n" * 3)
    done = xformer("train-lm", *options, "--valid-text", valid, "--out", tmp_path / "run")
    assert done.code == 0
    assert f"training: {len(TEXT):,} characters\nvalidation: 48 characters, 9 of them unknown\n" in done.out
    assert set(RunDirectory(tmp_path / "run").read_config()["data"]) == {"text", "valid_text"}
    again = xformer("train-lm", "--out", tmp_path / "run", "--resume", "--max-updates", 7)
    assert (again.code, again.err) == (0, "")


def test_byte_pairs(xformer, options, tmp_path):
    recipe = write(tmp_path / "bpe.toml", RECIPE + '[tokenizer]\nmodel = "bpe"\nvocab_size = 90\n')
    done = xformer("train-lm", *options, "--recipe", recipe, "--out", tmp_path / "run")
    assert (done.code, done.err) == (0, "")
    tokenizer = RunDirectory(tmp_path / "run").load_tokenizer("joint")
    assert (tokenizer.model, tokenizer.vocab_size) == ("bpe", 90)
    assert f"characters, {len(tokenizer.encode_text(split(TEXT, 0.1)[0])):,} tokens" in done.out


def test_inspect_shows_it(xformer, run):
    done = xformer("inspect", run)
    assert (done.code, done.err) == (0, "")
    for words in ("a run of xformer train-lm (language_modeling)", "context_length", "layers 0", "train_characters"):
        assert words in done.out
    assert "\ntokenizer: characters, " in done.out
    report = json.loads(xformer("inspect", run, "--json").out)
    assert sum(report["parameters"].values()) == report["config"]["num_parameters"]


# --- Going on ---------------------------------------------------------------------------------------------------------


def test_a_resumed_run_has_the_bits_of_an_uninterrupted_one(xformer, start_process, options, tmp_path, monkeypatch):
    monkeypatch.setenv("XFORMER_NUM_THREADS", "2")
    recipe = write(tmp_path / "long.toml", RECIPE.replace("max_updates = 6", "max_updates = 100000"))
    process = start_process("train-lm", *options, "--recipe", recipe, "--out", tmp_path / "stopped")
    wait_for_state(process, tmp_path / "stopped")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err.count(b"\n")) == (130, 1)
    assert err.startswith(b"stopping as soon as the state is saved")
    assert b"train-lm --out" in out
    last = json.loads(load_arrays(tmp_path / "stopped" / "last.safetensors")[1]["progress"])["step"]
    end = last + 7
    done = xformer("train-lm", "--out", tmp_path / "stopped", "--resume", "--max-updates", end)
    assert (done.code, done.err) == (0, "")
    assert f"going on after update {last}" in done.out
    assert xformer("train-lm", *options, "--out", tmp_path / "whole", "--max-updates", end).code == 0
    assert state(tmp_path / "stopped") == state(tmp_path / "whole")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["--seed", 5], "error: --seed is 5; the run began with 0"),
        (["--valid-share", 0.2], "error: --valid-share is 0.2; the run began with 0.1"),
        (["--valid-text", "text"], "--valid-text is given, and the run began without it; leave it out"),
        (["--text", "recipe.toml"], "recipe.toml is not the text that the run began with"),
        (["--backend", "torch"], "--backend is torch; the run in"),
    ],
)
def test_resume_refuses_other_settings(refused, run, tmp_path, changes, message):
    changes = [tmp_path / word if word in ("text", "recipe.toml") else word for word in changes]
    assert message in refused("train-lm", "--out", run, "--resume", *changes, untouched=tmp_path)


def test_resume_refuses_another_model(refused, run, tmp_path):
    recipe = write(tmp_path / "other.toml", RECIPE.replace("num_layers = 1", 'num_layers = 1\nactivation = "gelu"'))
    error = refused("train-lm", "--out", run, "--resume", "--recipe", recipe, untouched=tmp_path)
    assert f"activation is 'gelu' in {recipe}; the run began with 'relu'" in error


def test_each_command_goes_on_with_its_own_runs(refused, run, trained, tmp_path):
    error = refused("train", "--out", run, "--resume", untouched=tmp_path)
    assert "holds a run of train-lm; go on with it with: xformer train-lm --resume" in error
    shutil.copytree(trained, tmp_path / "pairs")
    error = refused("train-lm", "--out", tmp_path / "pairs", "--resume", untouched=tmp_path)
    assert "holds a run of train; go on with it with: xformer train --resume" in error


# --- Bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "text is empty; expected UTF-8 text"),
        (b"one\nz\xe9ro\n", "text is not valid UTF-8: line 2"),
        ("a", "the training text has 1 tokens; expected at least 13"),
        ("twelve char\n", "the training text has 10 tokens; expected at least 13"),
    ],
)
def test_bad_text(refused, options, tmp_path, content, message):
    write(tmp_path / "text", content)
    assert message in refused("train-lm", *options, "--out", tmp_path / "run", untouched=tmp_path)


def test_a_validation_text_of_one_character(refused, options, tmp_path):
    valid = write(tmp_path / "valid", "o")
    error = refused("train-lm", *options, "--valid-text", valid, "--out", tmp_path / "run", untouched=tmp_path)
    assert "the validation text has 1 tokens; expected at least 2" in error


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--valid-share", 1.5], "error: --valid-share is 1.5; expected a number between 0 and 1"),
        (["--valid-share", 0.2, "--valid-text", "x"], "--valid-text and --valid-share are both given"),
        (["--valid-text", "nowhere"], "cannot read nowhere"),
        (["--max-updates", 0], "error: --max-updates is 0"),
        (["--dtype", "float16"], "error: --dtype is 'float16'"),
        (["--precision", "half"], "error: --precision is 'half'; expected one of 'float32', 'bfloat16', 'float16'"),
        (["--precision", "float16", "--dtype", "float64"], "precision is 'float16' and dtype 'float64'"),
        (["--backend", "numpi"], "backend 'numpi' is unknown"),
    ],
)
def test_bad_options(refused, options, tmp_path, more, message):
    assert message in refused("train-lm", *options, *more, "--out", tmp_path / "run", untouched=tmp_path)


def test_a_text_is_needed(refused, tmp_path):
    error = refused("train-lm", "--out", tmp_path / "run", untouched=tmp_path)
    assert "--text not given; a new run needs a file of text (or --resume" in error


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ("[training]\nbatch_tokens = 3", "unknown key 'batch_tokens' in [training] of {}"),
        ("[training]\nlong_lines = 'cut'", "unknown key 'truncation'"),
        ("[training]\nbatch_size = 0", "batch_size is 0; expected at least 1"),
        ("[training]\ncontext_length = 0", "context_length is 0; expected at least 1"),
        ("[training]\nselect_by = 'score'", "a language model has its loss alone"),
        ("[tokenizer]\nmodel = 'words'", "model 'words' forgets spaces and line ends"),
        ("[tokenizer]\njoint = true", "unknown key 'joint' in [tokenizer] of {}"),
        ("[tokenizer]\nvocab_size = 9", "error: [tokenizer]: vocab_size is 9; expected at least"),
        ("[model]\nnum_encoder_layers = 2", "unknown key 'num_encoder_layers' in [model] of {}"),
        ("[model]\nvocab_size = 2", "unknown key 'vocab_size'"),
        ("[model]\npositions = 'learned'\nmax_positions = 64", "context_length is 128; expected at most"),
        ("task = 'translation'", "task is 'translation' in {}; xformer train-lm is for language_modeling; use: "),
        ("task = [1]", "task is [1] in {}; xformer train-lm is for language_modeling"),
        ("task = 'poetry'", "task is 'poetry' in {}; xformer train-lm is for language_modeling"),
    ],
)
def test_bad_recipes(refused, options, tmp_path, recipe, message):
    path = write(tmp_path / "bad.toml", recipe)
    error = refused("train-lm", *options, "--recipe", path, "--out", tmp_path / "run", untouched=tmp_path)
    assert message.format(path) in error


def test_train_refuses_the_recipe_of_a_language_model(refused, options, train_options, tmp_path):
    error = refused("train", *train_options, *options[2:], "--out", tmp_path / "run", untouched=tmp_path)
    assert "xformer train is for translation or summarization; use: " in error
    assert error.endswith("train-lm\n")
