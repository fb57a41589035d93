"""What differs on Windows, simulated on Linux: functions that are missing, open files that stay, the encoding."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="simulates Windows on Linux")

WINDOWS = """
import fcntl, os, shutil, signal, subprocess, sys, tempfile, types

import sacrebleu  # asks for the system while it is imported

for module, names in (
    (os, "fork register_at_fork sched_getaffinity fchmod geteuid getuid confstr getloadavg killpg mkfifo"),
    (signal, "SIGALRM SIGHUP SIGKILL SIGUSR1 alarm setitimer"),
):
    for name in names.split():
        delattr(module, name)


def locking(handle, mode, size):
    try:
        fcntl.flock(handle, mode)
    except BlockingIOError as error:
        raise PermissionError(*error.args) from None


sys.modules["msvcrt"] = types.SimpleNamespace(LK_NBLCK=fcntl.LOCK_EX | fcntl.LOCK_NB, locking=locking)
sys.modules |= dict.fromkeys(("fcntl", "grp", "pwd", "resource", "termios"))


def without_directories(path, *arguments, open=os.open, **keywords):
    if os.path.isdir(path):
        raise PermissionError(13, "Permission denied", os.fspath(path))
    return open(path, *arguments, **keywords)


def of_closed_files(function):
    def change(*paths, **keywords):
        for descriptor in os.listdir("/proc/self/fd"):
            try:
                opened = os.readlink("/proc/self/fd/" + descriptor)
            except OSError:
                continue
            for path in map(os.path.abspath, paths):
                if opened == path or opened.startswith(path + "/"):
                    raise PermissionError(13, "The file is open", path)
        return function(*paths, **keywords)

    return change


os.open, shutil._use_fd_functions = without_directories, False
for name in ("replace", "rename", "unlink", "remove"):
    setattr(os, name, of_closed_files(getattr(os, name)))
tempfile.TemporaryFile = lambda **options: tempfile.NamedTemporaryFile(**options, delete=False)
"""
TRAIN = """
import xformer as xf
from xformer.cli.main import exit_code

out, lines = sys.argv[1], ["gr\\u00f6\\u00dfer " * n + "\\u2192" for n in range(1, 40)]
os.mkdir(out)
texts = {"source": lines, "target": lines, "valid_source": lines[:2], "valid_target": lines[:2]}
model = {"d_model": 8, "num_heads": 2, "d_ff": 8, "num_encoder_layers": 1, "num_decoder_layers": 1}
recipe = {"model": model, "tokenizer": {"vocab_size": 50}, "training": {"max_steps": 2, "batch_tokens": 256}}
xf.train(recipe, **texts, out=out, progress=False)
xf.resume(out, max_steps=3, progress=False)
assert xf.Translator.from_pretrained(out)(lines[:2])
with open(out + "/.lock", "w", encoding="utf-8") as file:
    fcntl.flock(file, fcntl.LOCK_EX)
    assert exit_code(["resume", out]) == 2
with open("texts", "w", encoding="utf-8") as file:
    file.write("\\n".join(lines) + "\\n")
assert exit_code(["translate", "--model", out, "--input", "texts", "--output", "outputs"]) == 0
assert len(open("outputs", "rb").read().splitlines()) == len(lines)
"""


def run_on_windows(program, *arguments, folder):
    """Run a program in a process without what Windows lacks, with ASCII as the encoding of the system."""
    options = ["-X", "utf8=0", "-X", "warn_default_encoding", "-W", "error::EncodingWarning"]
    environment = {**os.environ, "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, *options, "-c", WINDOWS + program, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, cwd=folder, env=environment, encoding="utf-8")


def test_train_resume_and_translate(tmp_path):
    done = run_on_windows(TRAIN, tmp_path / "run", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "another process is training in" in done.stderr
