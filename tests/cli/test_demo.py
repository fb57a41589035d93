from __future__ import annotations

import dataclasses
import functools
import shutil
import signal

import pytest

from xformer.cli import demo
from xformer.models import TransformerConfig
from xformer.runs.run_directory import RunDirectory
from xformer.text import numbers_task, reverse_task

TINY = {"d_model": 16, "num_heads": 2, "d_ff": 32, "num_encoder_layers": 1, "num_decoder_layers": 1}


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Demos of the same kind that end after some updates, having learned hardly anything."""
    sizes = {"num_train": 400, "num_valid": 5, "num_test": 8}
    tasks = {"numbers": functools.partial(numbers_task, largest=9999, **sizes)}
    tasks |= {"reverse": functools.partial(reverse_task, **sizes)}
    training = {"batch_tokens": 256, "max_updates": 4, "validate_every": 2}
    demos = {
        name: dataclasses.replace(demo.DEMOS[name], task=task, model=TINY, training=training)
        for name, task in tasks.items()
    }
    monkeypatch.setattr(demo, "DEMOS", demos)


def test_the_demo_from_text_to_picture(xformer, tmp_path):
    done = xformer("demo", "--out", tmp_path / "demo", "--seed", 3)
    assert (done.code, done.err) == (0, "")
    assert "English number words to German" in done.out
    assert "8 unseen sources: 0.0 % exactly right, BLEU " in done.out
    assert "(of characters, since each line is one word)" in done.out
    assert done.out.count("  wrong  ") == 6
    assert f"translate --model {tmp_path / 'demo'}" in done.out
    assert "train --source train.de" in done.out
    assert (tmp_path / "demo" / "attention.png").read_bytes().startswith(b"\x89PNG")
    config = RunDirectory(tmp_path / "demo").read_config()
    assert (config["kind"], config["data"]) == ("demo", {"task": "numbers", "seed": 3})
    assert config["recipe"]["training"]["max_minutes"] == 1.5


def test_another_task_for_other_seconds(xformer, tmp_path):
    done = xformer("demo", "--task", "reverse", "--seconds", 30, "--out", tmp_path / "demo")
    assert done.code == 0
    assert "a sequence in reverse" in done.out
    assert "of characters" not in done.out
    assert RunDirectory(tmp_path / "demo").read_config()["recipe"]["training"]["max_minutes"] == 0.5


def test_the_result_is_a_run_like_any_other(xformer, tmp_path):
    assert xformer("demo", "--out", tmp_path / "demo").code == 0
    assert xformer("inspect", tmp_path / "demo").code == 0
    assert xformer("translate", "--model", tmp_path / "demo", stdin=b"forty-two\n").code == 0


def test_a_perfect_validation_ends_training(xformer, tmp_path, monkeypatch):
    class Perfect(demo.ValidationScore):
        def __call__(self, model):
            self.outputs = list(self.corpus.text.target)
            return 100.0

    monkeypatch.setattr(demo, "ValidationScore", Perfect)
    done = xformer("demo", "--out", tmp_path / "demo")
    assert "ended after update 2: the goal is reached" in done.out


def test_an_earlier_demo_is_replaced(xformer, tmp_path):
    assert xformer("demo", "--out", tmp_path / "demo").code == 0
    assert xformer("demo", "--out", tmp_path / "demo", "--task", "reverse").code == 0
    assert RunDirectory(tmp_path / "demo").read_config()["data"]["task"] == "reverse"


def test_a_stopped_demo_says_so(xformer, tmp_path, monkeypatch):
    monkeypatch.setattr("xformer.cli._training.Trainer.run", lambda self: "stopped by SIGINT")
    done = xformer("demo", "--out", tmp_path / "demo")
    assert done.code == 128 + signal.SIGINT
    assert "start it again" in done.out


# --- Bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("content", ["letter", "run", "demo with a letter", "file"])
def test_what_is_not_a_demo_is_not_touched(refused, xformer, trained, tmp_path, content):
    out = tmp_path / "out"
    if content == "run":
        shutil.copytree(trained, out)
    elif content == "file":
        out.write_text("dear")
    else:
        if content == "demo with a letter":
            assert xformer("demo", "--out", out).code == 0
        out.mkdir(exist_ok=True)
        (out / "letter.txt").write_text("dear")
    assert "choose another --out" in refused("demo", "--out", out, untouched=tmp_path)


def test_bad_input_leaves_an_earlier_demo(refused, xformer, tmp_path):
    assert xformer("demo", "--out", tmp_path / "demo").code == 0
    out = ["--out", tmp_path / "demo"]
    assert "--task is 'number'" in refused("demo", "--task", "number", *out, untouched=tmp_path)
    assert "seed is -1" in refused("demo", "--seed", "-1", *out, untouched=tmp_path)
    assert "'numpi' is unknown" in refused("demo", "--backend", "numpi", *out, untouched=tmp_path)


# --- The parts --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["numbers", "reverse", "copy"])
def test_the_recipes_of_the_demo_are_recipes(name, monkeypatch):
    monkeypatch.undo()
    chosen = demo.DEMOS[name]
    recipe = chosen.recipe(chosen.task(num_train=1000), None, 7)
    assert recipe.training.seed == 7
    assert recipe.training.max_minutes == chosen.seconds / 60.0
    TransformerConfig(source_vocab_size=128, target_vocab_size=128, **recipe.model)


@pytest.mark.parametrize(
    ("tokens", "clear"),
    [
        (["▁two", "▁hundred", "▁thirty-", "nine"], True),
        (["▁two", "▁hundred", "▁fif", "ty-f", "our"], False),
        (["▁thirty-", "nine"], False),
    ],
)
def test_the_picture_shows_a_crossing(tokens, clear):
    assert demo._shows_crossing(tokens) == clear


def test_bleu_of_single_words_counts_characters():
    assert demo._bleu(["zweiundvierzig"], ["zweiundvierzig"]) == pytest.approx(100)
    assert 0 < demo._bleu(["zweiundvierzig"], ["zweiundfünfzig"]) < 100
    assert demo._bleu(["4 3 9 7"], ["4 3 9 7"]) == pytest.approx(100)
