"""`xformer resume`: the same bits as an uninterrupted run, and refusal of damaged or changed files."""

from __future__ import annotations

import json
import shutil
import signal
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import events, state, wait_for_state, write
from tests.conftest import needs_fused_products
from xformer import native
from xformer.families.run_directory import RunDirectory
from xformer.io import load_arrays

STOPPING = "stopping as soon as the state is saved; a second Ctrl-C ends at once\n"


def stopped_run(start_process, train_options, run, how):
    """Start a long run in a process of its own and stop it by a signal; returns (exit code, output, errors)."""
    process = start_process("train", *train_options, "--out", run, "--max-steps", 100_000)
    wait_for_state(process, run)
    process.send_signal(how)
    out, err = process.communicate(timeout=60)
    return process.returncode, out.decode(), err.decode()


SLOW = [pytest.param(each, marks=pytest.mark.slow) for each in (signal.SIGKILL, signal.SIGTERM, signal.SIGHUP)]


@pytest.mark.parametrize("how", [signal.SIGINT, *SLOW])
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
        assert "everything is saved; continue with:" in out
        assert (tmp_path / "stopped" / "model.safetensors").exists()
    last = json.loads(load_arrays(tmp_path / "stopped" / "last.safetensors")[1]["progress"])["step"]
    end = last + 7
    monkeypatch.setenv("XFORMER_NUM_THREADS", "1")  # the run remembers that it works in two shards
    done = xformer("resume", tmp_path / "stopped", "--max-steps", end)
    assert (done.code, done.err) == (0, "")
    assert f"resuming after step {last}" in done.out
    monkeypatch.setenv("XFORMER_NUM_THREADS", "2")
    assert xformer("train", *train_options, "--out", tmp_path / "complete", "--max-steps", end).code == 0
    assert state(tmp_path / "stopped") == state(tmp_path / "complete")
    steps = [event["step"] for event in events(tmp_path / "stopped", "step")]
    assert steps == sorted(set(steps))


@needs_fused_products
def test_a_run_continues_in_its_mode(xformer, refused, train_options, trained, tmp_path, mode):
    shutil.copytree(trained, tmp_path / "default")
    error = refused("resume", tmp_path / "default", "--reproducible", "--max-steps", 8, untouched=tmp_path)
    assert error == "error: the run has reproducible=false; omit --reproducible and unset XFORMER_REPRODUCIBLE\n"
    assert xformer("train", *train_options, "--out", tmp_path / "run", "--reproducible").code == 0
    assert RunDirectory(tmp_path / "run").read_config()["recipe"]["training"]["reproducible"]
    mode(False)
    assert xformer("resume", tmp_path / "run", "--max-steps", 8).code == 0
    assert native.is_reproducible()


def test_a_run_killed_before_it_saved_anything_starts_again(xformer, train_options, trained, tmp_path):
    shutil.copytree(trained, tmp_path / "run")
    (tmp_path / "run" / "last.safetensors").unlink()
    (tmp_path / "run" / "model.safetensors").unlink()
    done = xformer("resume", tmp_path / "run")
    assert done.code == 0
    assert "nothing was saved yet; starting from the first step" in done.out
    assert state(tmp_path / "run") == state(trained)
    assert [event["step"] for event in events(tmp_path / "run", "validation")] == [4, 6]


def test_resume_without_its_state_keeps_the_model(refused, trained, tmp_path):
    shutil.copytree(trained, tmp_path / "run")
    (tmp_path / "run" / "last.safetensors").unlink()
    error = refused("resume", tmp_path / "run", "--max-steps", 9, untouched=tmp_path)
    assert "last.safetensors is missing, but" in error
    assert "has a trained model; restore it, or start a new run" in error


def test_changed_data_is_refused(refused, xformer, trained, text, tmp_path):
    shutil.copytree(trained, tmp_path / "run")
    source = write(tmp_path / "train.en", (text / "train.en").read_text().replace("one", "two"))
    run = RunDirectory(tmp_path / "run")
    config = run.read_config()
    config["data"]["source"]["path"] = str(source)
    run.config.write_text(json.dumps(config))
    error = refused("resume", run.path, untouched=tmp_path)
    assert f"{source} has changed since the run started (its SHA-256 differs)" in error
    write(source, (text / "train.en").read_text())
    assert xformer("resume", run.path).code == 0
    source.unlink()
    error = refused("resume", run.path, untouched=tmp_path)
    assert f"{source} does not exist; restore it, or name the directory with the data (data, --data)" in error


def test_a_run_resumes_with_data_that_was_moved(refused, xformer, trained, text, tmp_path):
    shutil.copytree(trained, tmp_path / "run")
    shutil.copytree(text, tmp_path / "old")
    run = RunDirectory(tmp_path / "run")
    config = run.read_config()
    for entry in config["data"].values():
        entry["path"] = str(tmp_path / "old" / Path(entry["path"]).name)
    run.config.write_text(json.dumps(config))
    (tmp_path / "old").rename(tmp_path / "new")
    assert "(data, --data)" in refused("resume", run.path, untouched=tmp_path)
    assert xformer("resume", run.path, "--data", tmp_path / "new", "--max-steps", 8).code == 0
    assert xformer("resume", run.path, "--max-steps", 10).code == 0  # the run knows the directory
    write(tmp_path / "new" / "train.en", "one\n")
    error = refused("resume", run.path, "--data", tmp_path / "new", untouched=tmp_path)
    assert "train.en has changed since the run started" in error


def test_limits_and_backend_may_change(xformer, refused, trained, tmp_path):
    pytest.importorskip("torch")
    shutil.copytree(trained, tmp_path / "run")
    assert "--max-steps is 0" in refused("resume", tmp_path / "run", "--max-steps", 0, untouched=tmp_path)
    done = xformer("resume", tmp_path / "run", "--max-steps", 7, "--backend", "torch")
    assert (done.code, done.err) == (0, "")
    config = RunDirectory(tmp_path / "run").read_config()
    assert (config["backend"], config["recipe"]["training"]["max_steps"]) == ("torch", 7)
    assert [event["step"] for event in events(tmp_path / "run", "validation")] == [4, 6, 7]


def test_a_logger_without_its_package_is_refused_before_training(refused, trained, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert "run: pip install wandb" in refused("resume", trained, "--logger", "wandb", untouched=trained)
