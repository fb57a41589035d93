from __future__ import annotations

import errno
import hashlib
import importlib.util
import json
import os
import re
import shutil
import signal
import threading
import time

import numpy as np
import pytest

from xformer.io import load_arrays
from xformer.text import Tokenizer
from xformer.training import RunDirectory

SIZE = {"d_model": 16, "num_heads": 2, "d_ff": 32, "num_encoder_layers": 1, "num_decoder_layers": 1}
STOPPING = "stopping as soon as the state is saved; a second Ctrl-C ends at once\n"


def write(path, text):
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def events(run, kind):
    return [event for event in RunDirectory(run).read_log() if event["event"] == kind]


def state(run):
    """Model and moments of the last state, as bytes."""
    return {name: array.tobytes() for name, array in load_arrays(run / "last.safetensors")[0].items()}


def wait_for_state(process, run):
    """Wait until a run in another process has saved its state for the first time."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        assert process.poll() is None, process.communicate()
        if (run / "last.safetensors").exists():
            return
        time.sleep(0.01)
    pytest.fail("training did not get going")


# --- A run ------------------------------------------------------------------------------------------------------------


def test_a_run_leaves_its_files_and_says_what_is_next(xformer, train_options, tmp_path):
    done = xformer("train", *train_options, "--out", tmp_path / "run", "--seed", 3)
    assert (done.code, done.err) == (0, "")
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [
        "config.json",
        "last.safetensors",
        "log.jsonl",
        "model.safetensors",
        "tokenizer.json",
    ]
    assert "training: 400 sentence pairs" in done.out
    assert "validation after update 4" in done.out
    assert "validation after update 6" in done.out
    assert "ended after update 6: 6 updates" in done.out
    assert f"translate --model {tmp_path / 'run'}" in done.out
    assert [event["step"] for event in events(tmp_path / "run", "validation")] == [4, 6]


def test_the_configuration_is_what_was_really_used(xformer, train_options, text, tmp_path, monkeypatch):
    monkeypatch.setenv("XFORMER_NUM_THREADS", "3")
    options = ["--seed", 3, "--dtype", "float64", "--lowercase", "--vocab-size", 80, "--max-updates", 2]
    assert xformer("train", *train_options, *options, "--out", tmp_path / "run").code == 0
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert (config["kind"], config["backend"], config["seed"]) == ("train", "numpy", 3)
    assert config["recipe"]["model"] == SIZE
    tokenizer = {"vocab_size": 80, "model": "bpe", "joint": True, "lowercase": True}
    assert config["recipe"]["tokenizer"] == {**tokenizer, "unicode_form": "NFC", "documents": False, "language": "en"}
    assert (config["task"], config["recipe"]["task"]) == ("translation", "translation")
    training = config["recipe"]["training"]
    assert (training["seed"], training["dtype"], training["max_updates"], training["shards"]) == (3, "float64", 2, 3)
    for name, file in (("source", "train.en"), ("valid_target", "valid.de")):
        content = (text / file).read_bytes()
        assert config["data"][name] == {"path": str(text / file), "sha256": hashlib.sha256(content).hexdigest()}
    assert config["counts"]["train_pairs"] == 400
    arrays, _ = load_arrays(tmp_path / "run" / "model.safetensors")
    assert {array.dtype for array in arrays.values()} == {np.dtype("float64")}
    assert Tokenizer.load(tmp_path / "run" / "tokenizer.json").lowercase


def test_a_run_goes_on_in_the_precision_that_it_began_with(xformer, refused, train_options, tmp_path):
    run = tmp_path / "run"
    options = ["--precision", "float16", "--max-updates", 2]
    done = xformer("train", *train_options, *options, "--out", run)
    assert (done.code, done.err) == (0, "")
    assert "numpy, float32 computed in float16, " in done.out
    assert RunDirectory(run).read_config()["recipe"]["training"]["precision"] == "float16"
    error = refused("train", "--out", run, "--resume", "--precision", "bfloat16", untouched=run)
    assert "error: --precision is 'bfloat16'; the run began with 'float16'" in error
    error = refused("train", "--out", run, "--resume", "--dtype", "float64", untouched=run)
    assert "error: --dtype is 'float64'; the run began with 'float32', and only --max-minutes and --max-upd" in error
    assert xformer("train", "--out", run, "--resume", "--max-updates", 4).code == 0
    assert [event["loss_scale"] for event in events(run, "update")] == [2.0**16]
    assert {array.dtype for array in load_arrays(run / "model.safetensors")[0].values()} == {np.dtype("float32")}


def test_a_precision_that_a_library_lacks(refused, train_options, tmp_path):
    pytest.importorskip("array_api_strict")
    options = ["--precision", "bfloat16", "--backend", "array_api_strict"]
    error = refused("train", *train_options, *options, "--out", tmp_path / "run", untouched=tmp_path)
    assert "precision is 'bfloat16', in which array_api_strict cannot compute here" in error


def test_separate_vocabularies(xformer, train_options, text, tmp_path):
    recipe = write(tmp_path / "recipe.toml", (text / "recipe.toml").read_text() + "\n")
    recipe.write_text(recipe.read_text().replace("vocab_size = 100", "vocab_size = 90\njoint = false"))
    assert xformer("train", *train_options, "--recipe", recipe, "--out", tmp_path / "run").code == 0
    run = RunDirectory(tmp_path / "run")
    source, target = run.load_tokenizer("source"), run.load_tokenizer("target")
    assert not run.tokenizer("joint").exists()
    assert 3 in source.encode("ü")
    assert 3 not in target.encode("ü")


def test_without_limits_a_run_ends_after_half_an_hour(xformer, train_options, text, tmp_path, monkeypatch):
    recipe = write(tmp_path / "recipe.toml", (text / "recipe.toml").read_text().replace("max_updates = 6", ""))
    monkeypatch.setattr("xformer.cli.train_request._train", lambda *arguments, **options: 0)
    assert xformer("train", *train_options, "--recipe", recipe, "--out", tmp_path / "run").code == 0
    assert RunDirectory(tmp_path / "run").read_config()["recipe"]["training"]["max_minutes"] == 30.0


def test_minutes_end_a_run(xformer, train_options, text, tmp_path):
    recipe = write(tmp_path / "recipe.toml", (text / "recipe.toml").read_text().replace("max_updates = 6", ""))
    done = xformer("train", *train_options, "--recipe", recipe, "--out", tmp_path / "run", "--max-minutes", 0.005)
    assert done.code == 0
    assert "0.005 minutes" in done.out


def test_blank_pairs_are_left_out_and_counted(xformer, train_options, text, tmp_path):
    source = write(tmp_path / "train.en", "\n" + (text / "train.en").read_text().split("\n", 1)[1])
    done = xformer("train", *train_options, "--source", source, "--out", tmp_path / "run")
    assert done.code == 0
    assert "training: 399 sentence pairs (left out: 1 with a blank side)" in done.out


def test_long_pairs_can_be_dropped_and_are_counted(xformer, train_options, tmp_path):
    options = ["--max-length", 8, "--truncation", "drop"]
    done = xformer("train", *train_options, *options, "--out", tmp_path / "run")
    assert done.code == 0
    counts = RunDirectory(tmp_path / "run").read_config()["counts"]
    assert counts["train_pairs"] + counts["train_pairs_dropped_long"] == 400
    assert 0 < counts["train_pairs_dropped_long"] < 400
    assert f"{counts['train_pairs_dropped_long']} too long" in done.out


# jax compiles anew for every length that decoding meets, which takes a minute; the trainer's own tests use it.
@pytest.mark.parametrize("backend", ["torch", "array_api_strict"])
def test_other_libraries_train_too(xformer, train_options, tmp_path, backend):
    pytest.importorskip(backend)
    options = ["--backend", backend, "--max-updates", 1]
    done = xformer("train", *train_options, *options, "--out", tmp_path / "run")
    assert (done.code, done.err) == (0, "")
    assert f"; {backend}, float32, 1 shard" in done.out


# --- Bad input --------------------------------------------------------------------------------------------------------


def options_with(train_options, **changed):
    return [
        *train_options,
        *[word for name, value in changed.items() for word in (f"--{name.replace('_', '-')}", value)],
    ]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("one\n", r"train.en has 1 lines and .*train.de has 400"),
        ("", r"train.en is empty"),
        (b"one\nz\xe9ro\n", r"train.en is not valid UTF-8: line 2, byte 2 is 0xe9"),
        ("x" * 100_001, r"train.en line 1 has more than 100000 characters"),
        (b"\x1f\x8b\x08", r"gzip"),
    ],
)
def test_bad_text(refused, train_options, tmp_path, content, message):
    source = write(tmp_path / "train.en", content)
    options = options_with(train_options, source=source, out=tmp_path / "run")
    assert re.search(message, refused("train", *options, untouched=tmp_path))


def test_a_missing_file(refused, train_options, tmp_path):
    options = options_with(train_options, valid_target=tmp_path / "nowhere", out=tmp_path / "run")
    assert "cannot read" in refused("train", *options, untouched=tmp_path)


def test_a_pipe_instead_of_a_file(refused, train_options, text, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    content = (text / "train.en").read_bytes()
    writer = threading.Thread(target=(tmp_path / "pipe").write_bytes, args=(content,), daemon=True)
    writer.start()
    options = options_with(train_options, source=tmp_path / "pipe", out=tmp_path / "run")
    assert "is not a regular file" in refused("train", *options, untouched=tmp_path)


def test_missing_files_are_named(refused, tmp_path):
    error = refused("train", "--out", tmp_path / "run", "--source", "x", untouched=tmp_path)
    assert "--target, --valid-source, --valid-target not given" in error


@pytest.mark.parametrize(("name", "file"), [("source", "train.en"), ("valid_source", "valid.en")])
def test_long_lines_are_counted_and_reported(refused, train_options, text, tmp_path, name, file):
    lines = (text / file).read_text().split("\n")
    lines[4] = "one " * 300
    changed = write(tmp_path / "long.en", "\n".join(lines))
    error = refused("train", *options_with(train_options, **{name: changed}, out=tmp_path / "run"), untouched=tmp_path)
    assert "long.en has 1 line of more than 256 tokens, the first on line 5" in error
    assert "--truncation drop" in error


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--backend", "numpi"], "backend 'numpi' is unknown; expected one of numpy, cupy, torch"),
        (["--seed", "-1"], "error: --seed is -1; expected at least 0"),
        (["--dtype", "float8"], "error: --dtype is 'float8'; expected one of 'float32', 'float64'"),
        (["--precision", "bf16"], "error: --precision is 'bf16'; expected one of 'float32', 'bfloat16', 'float16'"),
        (
            ["--precision", "bfloat16", "--dtype", "float64"],
            "precision is 'bfloat16' and dtype 'float64'; mixed precision keeps the parameters in float32; leave one",
        ),
        (["--task", "poetry"], "error: --task is 'poetry'; xformer train is for translation or summarization"),
        (["--vocab-size", "10"], "error: [tokenizer]: vocab_size is 10; expected at least"),
        (["--vocab-size", "3"], "error: [tokenizer]: vocab_size is 3"),
        (["--max-updates", "0"], "error: --max-updates is 0"),
        (["--max-minutes", "nan"], "error: --max-minutes is nan"),
        (["--truncation", "trim"], "error: --truncation is 'trim'; expected one of 'error', 'drop', 'cut'"),
        (["--max-length", "0"], "error: --max-length is 0"),
    ],
)
def test_bad_options(refused, train_options, tmp_path, options, message):
    assert message in refused("train", *train_options, *options, "--out", tmp_path / "run", untouched=tmp_path)


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ("[training]\nwarmup_step = 3", "unknown key 'warmup_step' in [training] of {}; did you mean 'warmup_steps'?"),
        ("[trainng]\n", "unknown key 'trainng' in {}; did you mean 'training'?"),
        ("[model]\nd_model = 30\nnum_heads = 4", "d_model 30 is not divisible by num_heads 4"),
        ("[model]\npad_id = 7", "unknown key 'pad_id'"),
        ("[training]\nseed = 'one'", "seed in [training] of {} is 'one'; expected a value of type int"),
        ("[training]\nschedule = 'cosine'", "needs max_updates"),
        ("[tokenizer]\nmodel = 'wordpiece'", "tokenizer model is 'wordpiece'"),
        ("training = 3", "expected a table [training]"),
        ("[training", "{} is not valid TOML"),
        ("\xff", "{} is not valid TOML"),
    ],
)
def test_bad_recipes(refused, train_options, tmp_path, recipe, message):
    path = write(tmp_path / "bad.toml", recipe.encode("latin-1"))
    options = options_with(train_options, recipe=path, out=tmp_path / "run")
    assert message.format(path) in refused("train", *options, untouched=tmp_path)


def test_an_option_gives_a_schedule_its_end(xformer, train_options, text, tmp_path):
    recipe = (text / "recipe.toml").read_text().replace("max_updates = 6", "schedule = 'cosine'")
    path = write(tmp_path / "recipe.toml", recipe)
    done = xformer("train", *options_with(train_options, recipe=path, max_updates=2, out=tmp_path / "run"))
    assert done.code == 0


@pytest.mark.parametrize(
    ("lines", "options", "message"),
    [
        ("precision = 'bf16'", ["--seed", 1], "[training] of {recipe} with --seed: precision is 'bf16'; expected"),
        (
            "precision = 'float16'",
            ["--dtype", "float64"],
            "[training] of {recipe} with --dtype: precision is 'float16' and dtype 'float64'; ",
        ),
        (
            "[model]\npositions = 'learned'",
            ["--max-length", 1024],
            "[training] of {recipe} with --max-length: max_length",
        ),
        ("trainin = 1", [], "unknown key 'trainin' in [training] of {recipe}; known keys: "),
    ],
)
def test_errors_say_whether_the_recipe_or_an_option(refused, train_options, tmp_path, lines, options, message):
    path = write(tmp_path / "recipe.toml", f"[training]\n{lines}\n")
    given = options_with(train_options, recipe=path, out=tmp_path / "run")
    assert message.format(recipe=path) in refused("train", *given, *options, untouched=tmp_path)


def test_a_missing_recipe(refused, train_options, tmp_path):
    options = options_with(train_options, recipe=tmp_path / "nowhere.toml", out=tmp_path / "run")
    assert "cannot read recipe" in refused("train", *options, untouched=tmp_path)


def test_a_backend_that_is_not_installed_names_its_extra(refused, train_options, tmp_path, monkeypatch):
    real = importlib.import_module

    def import_module(name):
        if name == "xformer.backends.cupy_namespace":
            raise ImportError(name)
        return real(name)

    monkeypatch.setattr("xformer.backends.importlib.import_module", import_module)
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "cupy" else find_spec(name))
    error = refused("train", *train_options, "--backend", "cupy", "--out", tmp_path / "run", untouched=tmp_path)
    assert "run: pip install 'cupy-cuda13x[ctk]' ml_dtypes" in error


def test_out_that_holds_something(refused, train_options, trained, tmp_path):
    shutil.copytree(trained, tmp_path / "run")
    error = refused("train", *train_options, "--out", tmp_path / "run", untouched=tmp_path)
    assert "holds another run; pass --resume" in error
    (tmp_path / "full").mkdir()
    letter = write(tmp_path / "full" / "letter.txt", "dear")
    assert "is not empty" in refused("train", *train_options, "--out", tmp_path / "full", untouched=tmp_path)
    assert "is a file" in refused("train", *train_options, "--out", letter, untouched=tmp_path)
    assert "cannot make" in refused("train", *train_options, "--out", letter / "run", untouched=tmp_path)


def test_a_disk_that_is_full_at_the_start_leaves_nothing(refused, train_options, tmp_path, monkeypatch):
    real, calls = os.fsync, []

    def fsync(descriptor):
        calls.append(descriptor)
        if len(calls) > 2:  # the tokenizer and its directory fit, the configuration does not
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(descriptor)

    monkeypatch.setattr("xformer.io.os.fsync", fsync)
    error = refused("train", *train_options, "--out", tmp_path / "run", untouched=tmp_path)
    assert "config.json: No space left on device" in error


def test_a_disk_that_gets_full_leaves_the_old_state(xformer, train_options, tmp_path, monkeypatch):
    real, full = os.fsync, []

    def fsync(descriptor):
        if full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(descriptor)

    save_state = RunDirectory.save_state

    def then_full(self, *arguments):
        save_state(self, *arguments)
        full.append(True)

    monkeypatch.setattr("xformer.io.os.fsync", fsync)
    monkeypatch.setattr(RunDirectory, "save_state", then_full)
    done = xformer("train", *train_options, "--out", tmp_path / "run")
    assert done.code == 2
    assert done.err.count("\n") == 1
    assert "No space left on device" in done.err
    assert json.loads(load_arrays(tmp_path / "run" / "last.safetensors")[1]["progress"])["step"] == 4
    assert sorted(path.name for path in (tmp_path / "run").iterdir() if path.name.startswith(".")) == []


def test_a_loss_that_is_not_a_number_ends_the_run(xformer, train_options, text, tmp_path):
    recipe = (text / "recipe.toml").read_text().replace("warmup_steps = 20", "warmup_steps = 1")
    path = write(tmp_path / "bad.toml", recipe + "learning_rate_factor = 1e30\n")
    done = xformer("train", *options_with(train_options, recipe=path, max_updates=200, out=tmp_path / "run"))
    assert done.code == 2
    assert done.err.count("\n") == 1
    assert done.err.startswith("error: update 2: the loss is")
    assert "lower the learning rate, by a smaller learning_rate_factor (it is " in done.err
    assert " or more warmup_steps, in a new run (--resume keeps it); " in done.err
    assert "no state had been saved yet" in done.err
    assert not (tmp_path / "run" / "last.safetensors").exists()


def test_a_loss_that_stops_being_a_number_leaves_the_last_good_state(xformer, train_options, tmp_path, monkeypatch):
    monkeypatch.setattr(
        "xformer.runs.trainer.schedule", lambda *name, **settings: lambda step: 1e-3 if step <= 5 else 1e35
    )
    done = xformer("train", *options_with(train_options, max_updates=20, out=tmp_path / "run"))
    assert done.code == 2
    assert "error: update 7: the loss is" in done.err
    assert "the state of update 4 is kept" in done.err
    arrays, metadata = load_arrays(tmp_path / "run" / "last.safetensors")
    assert json.loads(metadata["progress"])["step"] == 4
    assert all(np.isfinite(array).all() for array in arrays.values())


def test_checkpoints_and_their_mean(xformer, train_options, text, tmp_path, monkeypatch):
    recipe = (text / "recipe.toml").read_text() + 'keep_checkpoints = 2\naverage = "last"\nselect_by = "loss"\n'
    path, losses = write(tmp_path / "average.toml", recipe), iter([3.0, 2.0, 1.0])
    monkeypatch.setattr("xformer.runs.trainer.Trainer.validation_loss", lambda self, model: next(losses))
    done = xformer("train", *options_with(train_options, recipe=path, max_updates=8, out=tmp_path / "run"))
    assert done.code == 0
    assert "mean of 2 models: validation after update 8" in done.out
    assert "the averaged model is in" in done.out
    assert "validation loss 1.0000" in done.out
    names = sorted(path.name for path in (tmp_path / "run" / "checkpoints").glob("step-*"))
    assert names == ["step-4.safetensors", "step-8.safetensors"]
    again = xformer("train", "--out", tmp_path / "run", "--resume")
    assert (again.code, "nothing left to do: 8 updates" in again.out) == (0, True)


# --- Going on ---------------------------------------------------------------------------------------------------------


def stopped_run(start_process, train_options, run, how):
    """Start a long run in a process of its own and stop it by a signal; returns (exit code, output, errors)."""
    process = start_process("train", *train_options, "--out", run, "--max-updates", 100_000)
    wait_for_state(process, run)
    process.send_signal(how)
    out, err = process.communicate(timeout=60)
    return process.returncode, out.decode(), err.decode()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_resumed_run_has_the_bits_of_an_uninterrupted_one(
    xformer, start_process, train_options, tmp_path, monkeypatch, how
):
    monkeypatch.setenv("XFORMER_NUM_THREADS", "2")
    code, out, err = stopped_run(start_process, train_options, tmp_path / "stopped", how)
    assert code == {signal.SIGKILL: -9, signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 129}[how]
    if how == signal.SIGKILL:
        assert err == ""
    else:
        assert err == STOPPING
        assert f"stopped by {how.name}" in out
        assert "everything is saved; go on with:" in out
        assert (tmp_path / "stopped" / "model.safetensors").exists()
    last = json.loads(load_arrays(tmp_path / "stopped" / "last.safetensors")[1]["progress"])["step"]
    end = last + 7
    monkeypatch.setenv("XFORMER_NUM_THREADS", "1")  # the run remembers that it works in two shards
    done = xformer("train", "--out", tmp_path / "stopped", "--resume", "--max-updates", end)
    assert (done.code, done.err) == (0, "")
    assert f"going on after update {last}" in done.out
    monkeypatch.setenv("XFORMER_NUM_THREADS", "2")
    assert xformer("train", *train_options, "--out", tmp_path / "whole", "--max-updates", end).code == 0
    assert state(tmp_path / "stopped") == state(tmp_path / "whole")
    steps = [event["step"] for event in events(tmp_path / "stopped", "update")]
    assert steps == sorted(set(steps))


def test_a_run_that_nobody_watches_any_more_is_saved(xformer, start_process, train_options, tmp_path):
    process = start_process("train", *train_options, "--out", tmp_path / "run", "--max-updates", 100_000)
    wait_for_state(process, tmp_path / "run")
    process.stdout.close()
    process.send_signal(signal.SIGHUP)
    assert process.wait(timeout=60) in (129, 141)
    assert process.stderr.read() == STOPPING.encode()
    last = json.loads(load_arrays(tmp_path / "run" / "last.safetensors")[1]["progress"])["step"]
    done = xformer("train", "--out", tmp_path / "run", "--resume", "--max-updates", last + 2)
    assert (done.code, done.err) == (0, "")


def test_two_trainings_do_not_share_a_directory(refused, start_process, train_options, tmp_path):
    process = start_process("train", *train_options, "--out", tmp_path / "run", "--max-updates", 100_000)
    wait_for_state(process, tmp_path / "run")
    error = refused("train", "--out", tmp_path / "run", "--resume", untouched=tmp_path / "nothing")
    assert "another training is at work in" in error
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)


def test_a_run_killed_before_it_saved_anything_starts_again(xformer, train_options, trained, tmp_path):
    shutil.copytree(trained, tmp_path / "run")
    (tmp_path / "run" / "last.safetensors").unlink()
    (tmp_path / "run" / "model.safetensors").unlink()
    done = xformer("train", "--out", tmp_path / "run", "--resume")
    assert done.code == 0
    assert "starting again from the first update" in done.out
    assert state(tmp_path / "run") == state(trained)
    assert [event["step"] for event in events(tmp_path / "run", "validation")] == [4, 6]


def test_a_finished_run_has_nothing_left_to_do(xformer, trained, tmp_path):
    shutil.copytree(trained, tmp_path / "run")
    done = xformer("train", "--out", tmp_path / "run", "--resume")
    assert done.code == 0
    assert "nothing left to do: 6 updates" in done.out
    assert state(tmp_path / "run") == state(trained)


def test_options_that_say_the_same_are_accepted(xformer, train_options, trained, tmp_path):
    shutil.copytree(trained, tmp_path / "run")
    options = [*train_options, "--seed", 0, "--backend", "numpy", "--max-updates", 8]
    assert xformer("train", *options, "--out", tmp_path / "run", "--resume").code == 0
    assert RunDirectory(tmp_path / "run").read_config()["recipe"]["training"]["max_updates"] == 8
    assert events(tmp_path / "run", "validation")[-1]["step"] == 8


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--seed", 5], "error: --seed is 5; the run began with 0"),
        (["--lowercase"], "error: --lowercase is True; the run began with False"),
        (["--dtype", "float64"], "error: --dtype is 'float64'; the run began with 'float32'"),
        (["--task", "summarization"], "error: --task is 'summarization'; the run began with 'translation'"),
        (["--backend", "torch"], "--backend is torch; the run in"),
        (["--max-updates", 0], "error: --max-updates is 0"),
    ],
)
def test_resume_refuses_other_settings(refused, trained, tmp_path, options, message):
    shutil.copytree(trained, tmp_path / "run")
    error = refused("train", "--out", tmp_path / "run", "--resume", *options, untouched=tmp_path)
    assert message in error


def test_resume_without_its_state_keeps_the_model(refused, trained, tmp_path):
    shutil.copytree(trained, tmp_path / "run")
    (tmp_path / "run" / "last.safetensors").unlink()
    error = refused("train", "--out", tmp_path / "run", "--resume", "--max-updates", 9, untouched=tmp_path)
    assert "last.safetensors is missing, but" in error
    assert "has a trained model; restore it to go on, or start a new run" in error


@pytest.mark.parametrize("key", ["model", "tokenizer", "training"])
def test_a_damaged_recipe_in_the_configuration(refused, trained, tmp_path, key):
    shutil.copytree(trained, tmp_path / "run")
    config = json.loads((tmp_path / "run" / "config.json").read_text(encoding="utf-8"))
    config["recipe"][key] = "text"
    (tmp_path / "run" / "config.json").write_text(json.dumps(config), encoding="utf-8")
    for command in (["translate", "--model"], ["inspect"]):
        error = refused(*command, tmp_path / "run", untouched=tmp_path)
        assert f"config.json is damaged: {key!r} of its recipe is not a table" in error


def test_resume_refuses_another_recipe(refused, trained, text, tmp_path):
    shutil.copytree(trained, tmp_path / "run")
    recipe = (text / "recipe.toml").read_text().replace("batch_tokens = 256", "batch_tokens = 128")
    path = write(tmp_path / "other.toml", recipe)
    error = refused("train", "--out", tmp_path / "run", "--resume", "--recipe", path, untouched=tmp_path)
    assert f"batch_tokens is 128 in {path}; the run began with 256" in error


def test_resume_refuses_other_text(refused, trained, text, tmp_path):
    shutil.copytree(trained, tmp_path / "run")
    other = write(tmp_path / "train.en", (text / "train.en").read_text().replace("one", "two"))
    error = refused("train", "--out", tmp_path / "run", "--resume", "--source", other, untouched=tmp_path)
    assert "is not the text that the run began with" in error


def test_resume_without_a_run(refused, tmp_path):
    assert "holds no run" in refused("train", "--out", tmp_path / "run", "--resume", untouched=tmp_path)


def damage(path, how):
    if how == "empty":
        path.write_bytes(b"")
    elif how == "truncated":
        path.write_bytes(path.read_bytes()[:-20])
    elif how == "corrupted":
        content = bytearray(path.read_bytes())
        content[-1000] ^= 0xFF
        path.write_bytes(content)
    elif how == "foreign":
        path.write_bytes(b"%PDF-1.7 something else")
    else:
        path.unlink()


@pytest.mark.parametrize(
    ("file", "how"),
    [
        ("last.safetensors", "truncated"),
        ("last.safetensors", "corrupted"),
        ("last.safetensors", "foreign"),
        ("tokenizer.json", "truncated"),
        ("tokenizer.json", "foreign"),
        ("tokenizer.json", "missing"),
        ("config.json", "truncated"),
        ("config.json", "foreign"),
    ],
)
def test_resume_refuses_damaged_files(refused, trained, tmp_path, file, how, xformer):
    shutil.copytree(trained, tmp_path / "run")
    damage(tmp_path / "run" / file, how)
    done = xformer("train", "--out", tmp_path / "run", "--resume")
    assert done.code == 2
    assert done.err.count("\n") == 1
    assert "Traceback" not in done.err


@pytest.mark.parametrize("how", ["empty", "truncated", "corrupted", "foreign"])
def test_a_damaged_model_is_refused_and_a_removed_one_made_again(refused, trained, tmp_path, how, xformer):
    shutil.copytree(trained, tmp_path / "run")
    model = tmp_path / "run" / "model.safetensors"
    damage(model, how)
    error = refused("train", "--out", tmp_path / "run", "--resume", untouched=tmp_path)
    assert f"error: {model} is " in error
    assert "; use another copy, or remove it, so that the next validation makes a new one" in error
    model.unlink()
    done = xformer("train", "--out", tmp_path / "run", "--resume")
    assert "the best model, after update 6, is in" in done.out
    assert xformer("train", "--out", tmp_path / "run", "--resume", "--max-updates", 7).code == 0
    assert load_arrays(model)[1]["format"] == "xformer"


def test_resume_refuses_a_configuration_with_holes(refused, trained, tmp_path):
    shutil.copytree(trained, tmp_path / "run")
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    del config["data"]["source"]["sha256"]
    (tmp_path / "run" / "config.json").write_text(json.dumps(config))
    error = refused("train", "--out", tmp_path / "run", "--resume", untouched=tmp_path)
    assert "not a whole run configuration" in error
