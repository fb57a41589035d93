from __future__ import annotations

import contextlib
import functools
import io
import shutil
import signal

import pytest

from tests.cli.conftest import write
from xformer.cli import demo
from xformer.cli.main import exit_code
from xformer.data.demo_tasks import numbers_task
from xformer.families.run_directory import RunDirectory
from xformer.models import TransformerConfig

RECIPE = demo.RECIPE
TINY = """
model = {d_model = 16, num_heads = 2, d_ff = 32, num_encoder_layers = 1, num_decoder_layers = 1}
tokenizer = {vocab_size = 128}
training = {batch_tokens = 256, max_steps = 4, validate_every = 2}
"""


@pytest.fixture(autouse=True, scope="module")
def small(tmp_path_factory):
    """Make the demo end after a few steps, having learned hardly anything."""
    sizes = {"num_train": 400, "num_valid": 5, "num_test": 8, "largest": 9999}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo, "numbers_task", functools.partial(numbers_task, **sizes))
        patch.setattr(demo, "RECIPE", write(tmp_path_factory.mktemp("recipe") / "tiny.toml", TINY))
        yield


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The directory of a demo that has ended, to be read only, and what it printed."""
    out, printed = tmp_path_factory.mktemp("demo") / "demo", io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert exit_code(["demo", "--out", str(out), "--seed", "3"]) == 0
    return out, printed.getvalue()


@pytest.fixture
def earlier(finished, tmp_path):
    """A copy of that directory."""
    return shutil.copytree(finished[0], tmp_path / "demo")


def test_the_demo_from_text_to_plot(finished):
    directory, printed = finished
    assert "English number words from 0 to 9,999, in lower case, to German" in " ".join(printed.split())
    assert "8 unseen sources: 0.0 % exactly right, BLEU " in printed
    assert "(of characters, since each line is one word)" in printed
    assert printed.count("  wrong  ") == 6
    assert f"translate --model {directory}" in printed
    assert f" serve --model {directory}\n" in printed
    assert "train --source train.de" in printed
    assert (directory / "attention.png").read_bytes().startswith(b"\x89PNG")
    config = RunDirectory(directory).read_config()
    assert (config["data"]["source"]["path"], config["seed"]) == (str(directory / "data" / "source"), 3)
    assert config["recipe"]["training"]["max_minutes"] == 1.5


def test_a_perfect_validation_ends_training(xformer, tmp_path, monkeypatch):
    monkeypatch.setattr("xformer.runs.pairs.PairsTask.score", lambda self, model, ranks: 100.0)
    done = xformer("demo", "--out", tmp_path / "demo")
    assert "ended after step 2: all validation outputs are correct" in done.out


def test_an_earlier_demo_is_replaced(xformer, earlier):
    before = (earlier / "data" / "target").read_text()
    assert xformer("demo", "--out", earlier, "--seed", 4, "--seconds", 30).code == 0
    assert (earlier / "data" / "target").read_text() != before
    assert RunDirectory(earlier).read_config()["recipe"]["training"]["max_minutes"] == 0.5


def test_a_stopped_demo_says_so(xformer, tmp_path, monkeypatch):
    monkeypatch.setattr("xformer.runs.trainer.Trainer.run", lambda self: "stopped by SIGINT")
    done = xformer("demo", "--out", tmp_path / "demo")
    assert done.code == 128 + signal.SIGINT
    assert "start it again" in done.out


# --- Bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("content", ["letter", "run", "demo with a letter", "file"])
def test_other_files_than_a_demo_are_not_touched(refused, finished, trained, tmp_path, content):
    out = tmp_path / "out"
    if content == "run":
        shutil.copytree(trained, out)
    elif content == "file":
        out.write_text("dear")
    else:
        if content == "demo with a letter":
            shutil.copytree(finished[0], out)
        out.mkdir(exist_ok=True)
        (out / "letter.txt").write_text("dear")
    assert "choose another --out" in refused("demo", "--out", out, untouched=tmp_path)


# --- The parts --------------------------------------------------------------------------------------------------------


def test_the_recipe_of_the_demo_is_a_recipe(monkeypatch):
    monkeypatch.setattr(demo, "RECIPE", RECIPE)
    recipe = demo.demo_recipe(60.0, 7)
    assert (recipe.training.seed, recipe.training.max_minutes) == (7, 1.0)
    TransformerConfig(source_vocab_size=128, target_vocab_size=128, **recipe.model)
