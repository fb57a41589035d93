from __future__ import annotations

import hashlib
import itertools
import json
import re
import shutil
import time

import numpy as np
import pytest

from tests.cli.conftest import RECIPE, events, write
from xformer.families.run_directory import RunDirectory
from xformer.io import load_arrays
from xformer.tokenizers import Tokenizer

SIZE = {"d_model": 16, "num_heads": 2, "d_ff": 32, "num_encoder_layers": 1, "num_decoder_layers": 1}
# --- A run ------------------------------------------------------------------------------------------------------------


def test_a_run_leaves_its_files_and_the_configuration_that_was_used(
    xformer, train_options, text, tmp_path, monkeypatch
):
    monkeypatch.setenv("XFORMER_NUM_THREADS", "3")
    run, options = tmp_path / "run", ["--seed", 3, "--dtype", "float64", "--lowercase", "--vocab-size", 80]
    done = xformer("train", *train_options, *options, "--out", run)
    assert (done.code, done.err) == (0, "")
    names = ["config.json", "last.safetensors", "log.jsonl", "model.safetensors", "tokenizer.json"]
    assert sorted(path.name for path in run.iterdir()) == names
    printed = ("training: 400 sentence pairs", "validation after step 4", "ended after step 6: 6 steps")
    assert all(words in done.out for words in (*printed, f"translate --model {run}"))
    assert [event["step"] for event in events(run, "validation")] == [4, 6]
    config = json.loads((run / "config.json").read_text())
    assert (config["backend"], config["seed"]) == ("numpy", 3)
    assert config["recipe"]["model"] == SIZE
    tokenizer = {"vocab_size": 80, "model": "bpe", "joint": True, "lowercase": True}
    assert config["recipe"]["tokenizer"] == {**tokenizer, "unicode_form": "NFC", "documents": False, "language": "en"}
    assert (config["task"], config["recipe"]["task"]) == ("translation", "translation")
    chosen = {"seed": 3, "dtype": "float64", "max_steps": 6, "data_parallel": 3}
    assert {name: config["recipe"]["training"][name] for name in chosen} == chosen
    for name, file in (("source", "train.en"), ("valid_target", "valid.de")):
        content = (text / file).read_bytes()
        assert config["data"][name] == {"path": str(text / file), "sha256": hashlib.sha256(content).hexdigest()}
    assert config["counts"]["train_pairs"] == 400
    arrays, _ = load_arrays(run / "model.safetensors")
    assert {array.dtype for array in arrays.values()} == {np.dtype("float64")}
    assert Tokenizer.load(run / "tokenizer.json").lowercase


def test_the_target_language_or_an_option_chooses_the_tokenizer_of_bleu(xformer, refused, train_options, tmp_path):
    valid = shutil.copy(train_options[train_options.index("--valid-target") + 1], tmp_path / "valid.zh")
    chinese = [*train_options, "--valid-target", valid, "--max-steps", 1, "--out"]
    done = xformer("train", *chinese, tmp_path / "a")
    assert (done.code, "validation by BLEU with the tokenizer zh of sacreBLEU" in done.out) == (0, True)
    (tmp_path / "recipe.toml").write_text(RECIPE + 'bleu_tokenize = "char"\n')
    assert xformer("train", *chinese, tmp_path / "b", "--recipe", tmp_path / "recipe.toml").code == 0
    assert xformer("train", *chinese, tmp_path / "c", "--bleu-tokenize", "intl").code == 0
    runs = [RunDirectory(tmp_path / name).read_config()["recipe"]["training"]["bleu_tokenize"] for name in "abc"]
    assert runs == ["zh", "char", "intl"]
    error = refused("train", *chinese, tmp_path / "d", "--bleu-tokenize", "moses", untouched=tmp_path)
    assert "tokenize is 'moses'; expected one of none, zh, 13a" in error
    error = refused(
        "train", *chinese, tmp_path / "d", "--bleu-tokenize", "zh", "--task", "summarization", untouched=tmp_path
    )
    assert "summarization is not scored by BLEU" in error


def test_the_number_of_steps_that_fit_repeats_the_run(xformer, train_options, tmp_path, monkeypatch):
    clock = itertools.count()
    options = [*train_options, "--set", "training.schedule=cosine", "--out"]
    with monkeypatch.context() as patch:
        patch.setattr(time, "monotonic", lambda: 0.1 * next(clock))  # a second passes in ten readings
        done = xformer("train", *options, tmp_path / "timed", "--max-minutes", 1, "--max-steps", 1000)
    assert (done.code, done.err) == (0, "")
    steps = re.search(
        r"([\d,]+) steps fit into 1 minutes; the recipe is made for 1,000; .*--max-steps (\d+) ", done.out
    )
    assert 20 < int(steps[2]) < 1000
    assert f"ended after step {steps[1]}: the time limit (1 min)" in done.out
    assert xformer("train", *options, tmp_path / "same", "--max-steps", steps[2]).code == 0
    for name in ("last.safetensors", "model.safetensors"):
        (timed, _), (same, _) = (load_arrays(tmp_path / run / name) for run in ("timed", "same"))
        assert {key: value.tobytes() for key, value in timed.items()} == {k: v.tobytes() for k, v in same.items()}
    error = xformer("resume", tmp_path / "timed", "--max-minutes", 2).err
    assert f"the learning rate falls after step {steps[2]}, too early to plan 2 minutes; expected" in error
    for minutes in (0, -1, "nan"):
        done = xformer("train", *options, tmp_path / "other", "--max-minutes", minutes)
        assert (done.code, "--max-minutes" in done.err, len(done.err.splitlines())) == (2, True, 1)


def test_a_run_is_resumed_in_its_precision(xformer, train_options, tmp_path):
    run = tmp_path / "run"
    options = ["--precision", "float16", "--max-steps", 2]
    done = xformer("train", *train_options, *options, "--out", run)
    assert (done.code, done.err) == (0, "")
    assert "numpy, float16 mixed precision, " in done.out
    assert RunDirectory(run).read_config()["recipe"]["training"]["precision"] == "float16"
    assert xformer("resume", run, "--max-steps", 4).code == 0
    assert [event["loss_scale"] for event in events(run, "step")] == [2.0**16]
    assert {array.dtype for array in load_arrays(run / "model.safetensors")[0].values()} == {np.dtype("float32")}


def test_blank_and_long_pairs_are_dropped_and_counted(xformer, train_options, text, tmp_path):
    source = write(tmp_path / "train.en", "\n" + (text / "train.en").read_text().split("\n", 1)[1])
    options = ["--source", source, "--max-length", 8, "--truncation", "drop"]
    done = xformer("train", *train_options, *options, "--out", tmp_path / "run")
    assert done.code == 0
    counts = RunDirectory(tmp_path / "run").read_config()["counts"]
    assert counts["train_pairs"] + counts["train_pairs_dropped_long"] == 399
    assert 0 < counts["train_pairs_dropped_long"] < 399
    assert f"(dropped: 1 with a blank side, {counts['train_pairs_dropped_long']} too long" in done.out


# --- Bad input --------------------------------------------------------------------------------------------------------


def options_with(train_options, **changed):
    return [
        *train_options,
        *[word for name, value in changed.items() for word in (f"--{name.replace('_', '-')}", value)],
    ]


def test_a_long_line_is_named(refused, train_options, text, tmp_path):
    lines = (text / "valid.en").read_text().split("\n")
    lines[4] = "one " * 300
    changed = write(tmp_path / "long.en", "\n".join(lines))
    error = refused(
        "train", *options_with(train_options, valid_source=changed, out=tmp_path / "run"), untouched=tmp_path
    )
    assert re.search(r"line 5 of .*long.en has \d+ tokens; expected at most 256; .* truncation 'drop'", error)


@pytest.mark.parametrize(("recipe", "options", "message"), [
    ("", ["--backend", "numpi"], "backend 'numpi' is unknown; expected one of numpy, cupy, torch"),
    ("", ["--seed", "-1"], "error: --seed is -1; expected at least 0"),
    ("", ["--precision", "bf16"], "error: --precision is 'bf16'; expected one of 'float32', 'bfloat16', 'float16'"),
    ("", ["--task", "poetry"], "error: task is 'poetry' in {recipe}; expected translation or summarization"),
    ("", ["--set", "training.seed=-1"], "{recipe} with the options given: seed is -1; expected at least 0"),
    ("", ["--set", "seed=1"], "error: --set is 'seed=1'; expected TABLE.NAME=VALUE"),
    ("", ["--vocab-size", "10"], "error: [tokenizer]: vocab_size is 10; expected at least"),
    ("", ["--max-minutes", "nan"], "error: --max-minutes is nan"),
    ("precision = 'float16'", ["--dtype", "float64"],
     "[training] of {recipe} with the options given: precision is 'float16' and dtype 'float64'; "),
    ("[model]\npositions = 'learned'", ["--max-length", 1024], "[training] of {recipe} with the options given: max_l"),
    ("trainin = 1", [], "unknown key 'trainin' in [training] of {recipe}; expected one of "),
    ("[trainng]", [], "unknown key 'trainng' in {recipe}; did you mean 'training'?"),
    ("[model]\nd_model = 30\nnum_heads = 4", [], "d_model 30 is not divisible by num_heads 4"),
    ("[training", [], "{recipe} is not valid TOML"),
    ("\xff", [], "{recipe} is not valid TOML"),
])  # fmt: skip
def test_bad_recipes_and_options(refused, train_options, tmp_path, recipe, options, message):
    path = write(tmp_path / "recipe.toml", f"[training]\n{recipe}\n".encode("latin-1"))
    given = options_with(train_options, recipe=path, out=tmp_path / "run")
    assert message.format(recipe=path) in refused("train", *given, *options, untouched=tmp_path)


def test_out_that_holds_something(refused, train_options, trained, tmp_path):
    shutil.copytree(trained, tmp_path / "run")
    error = refused("train", *train_options, "--out", tmp_path / "run", untouched=tmp_path)
    assert "holds a run; continue it with: xformer resume" in error
    (tmp_path / "full").mkdir()
    letter = write(tmp_path / "full" / "letter.txt", "dear")
    assert "is not empty" in refused("train", *train_options, "--out", tmp_path / "full", untouched=tmp_path)
    assert "is a file" in refused("train", *train_options, "--out", letter, untouched=tmp_path)
    assert "cannot create" in refused("train", *train_options, "--out", letter / "run", untouched=tmp_path)
