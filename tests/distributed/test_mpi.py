"""Training by processes that mpiexec starts: same bits for 1, 2 and 4 ranks, and failures end all of them."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("mpi4py")
MPIEXEC = shutil.which("mpiexec", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(MPIEXEC is None, reason="mpiexec is not installed")]

ENVIRONMENT = {**os.environ, "XFORMER_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
SETTINGS = ["data_parallel=4", "batch_tokens=150", "validate_every=10", "warmup_steps=10", "keep_checkpoints=2"]
SETTINGS += ["checkpoint_every=10", "average=last", "metric_for_best=loss"]  # the loss falls at every validation
MODEL = ["d_model=16", "d_ff=32", "num_heads=2", "num_encoder_layers=1", "num_decoder_layers=1"]
WORDS = {"ein": "a", "rot": "red", "hund": "dog", "haus": "house", "gross": "big", "und": "and", "das": "the"}


def start(count, *command):
    return subprocess.Popen(
        [MPIEXEC, "-n", str(count), sys.executable, *map(str, command)],
        env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def finish(process, timeout=120):
    output, _ = process.communicate(timeout=timeout)
    return process.returncode, output


def run(count, *command):
    return finish(start(count, *command))


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    words = list(WORDS)
    lines = [[words[(7 * row + 3 * column) % 7] for column in range(2 + row % 5)] for row in range(60)]
    for name, part in (("train", lines), ("valid", lines[:12])):
        (folder / f"{name}.de").write_text("".join(" ".join(line) + "\n" for line in part))
        (folder / f"{name}.en").write_text("".join(" ".join(WORDS[word] for word in line) + "\n" for line in part))
    sides = (("source", "train.de"), ("target", "train.en"), ("valid-source", "valid.de"), ("valid-target", "valid.en"))
    options = [part for name, file in sides for part in (f"--{name}", folder / file)]
    for setting in [*(f"training.{each}" for each in SETTINGS), *(f"model.{each}" for each in MODEL)]:
        options += ["--set", setting]
    return [*options, "--set", "tokenizer.model=words", "--distributed", "mpi"]


def train(count, files, out, *options):
    return run(count, "-m", "xformer", "train", *files, "--out", out, *options)


def digest(path):
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def digests(out):
    return [digest(out / name) for name in ("model.safetensors", "averaged.safetensors")]


def state(out):
    """Return the training state, without the wall time."""
    content = (out / "last.safetensors").read_bytes()
    length = int.from_bytes(content[:8], "little")
    progress = json.loads(json.loads(content[8 : 8 + length])["__metadata__"]["progress"])
    return {**progress, "minutes": 0.0}, hashlib.sha256(content[8 + length :]).hexdigest()


@pytest.fixture(scope="module")
def alone(files, tmp_path_factory):
    out = tmp_path_factory.mktemp("alone") / "run"
    code, output = train(1, files, out, "--max-steps", "30")
    assert code == 0, output
    return out


@pytest.mark.parametrize(
    ("count", "settings"),
    [
        (2, []),
        (4, []),
        (2, ["--set", "training.shard_optimizer=true"]),
        (2, ["--set", "training.overlap_communication=true"]),
    ],
    ids=["2", "4", "sharded", "overlapped"],
)
def test_the_bits_do_not_depend_on_the_number_of_ranks(alone, files, tmp_path, count, settings):
    code, output = train(count, files, tmp_path / "run", "--max-steps", "30", *settings)
    assert code == 0, output
    assert f"{count} ranks with {4 // count} shard" in output
    assert output.count("ended after step 30") == 1
    assert digests(tmp_path / "run") == digests(alone)
    assert state(tmp_path / "run") == state(alone)


def test_a_run_resumes_with_another_number_of_ranks(alone, files, tmp_path):
    for count, command in (
        (2, ["train", *files, "--out", tmp_path / "run", "--max-steps", "13"]),
        (4, ["resume", tmp_path / "run", "--max-steps", "21", "--distributed", "mpi"]),
        (1, ["resume", tmp_path / "run", "--max-steps", "30"]),
    ):
        code, output = run(count, "-m", "xformer", *command)
        assert code == 0, output
    assert digests(tmp_path / "run") == digests(alone)


def wait_for(path, process, timeout=60):
    deadline = time.monotonic() + timeout
    while not path.exists():
        assert process.poll() is None, finish(process)
        assert time.monotonic() < deadline
        time.sleep(0.05)


def ranks_of(process):
    """Return the process ids of the ranks, in no order."""
    found = subprocess.run(["ps", "-wweo", "pid,args"], capture_output=True, text=True, check=True).stdout
    marked = [line.split(None, 1) for line in found.splitlines() if process.marker in line and "mpiexec" not in line]
    return [int(pid) for pid, arguments in marked if "proxy" not in arguments]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=["SIGTERM", "SIGKILL"])
def test_a_signal_to_one_rank_ends_all(alone, files, tmp_path, number):
    out = tmp_path / "run"
    process = start(2, "-m", "xformer", "train", *files, "--out", out, "--max-steps", "100000")
    process.marker = str(out)
    wait_for(out / "last.safetensors", process)
    os.kill(ranks_of(process)[-1], number)
    code, output = finish(process, timeout=20)
    assert code != 0
    if number == signal.SIGTERM:
        assert "stopped by SIGTERM" in output
    steps = state(out)[0]["step"]
    code, output = run(2, "-m", "xformer", "resume", out, "--max-steps", str(steps + 5), "--distributed", "mpi")
    assert code == 0, output
    assert state(out)[0]["step"] == steps + 5


SCRIPT = """
import sys
import numpy as np
import xformer as xf
from xformer.distributed import connect


class Rows:
    def __init__(self, x):
        self.x, self.num_tokens = x, len(x)

    def split(self, count):
        return [Rows(part) for part in np.array_split(self.x, count)]


class Net(xf.Module):
    weight: object


ranks = connect("mpi")


def stop(event, loop):
    if sys.argv[1:] == ["raise"] and event.step == 3 and ranks.rank == 1:
        raise RuntimeError("a callback failed")


batches = [Rows(np.random.default_rng(n).standard_normal((8, 4), dtype="float32")) for n in range(3)]
loss = lambda model, batch, rng: np.ones(len(batch.x), "float32") @ (batch.x @ model.weight) ** 2
model, history = xf.fit(Net(np.ones(4, "float32")), loss, batches, optimizer=xf.SGD(), learning_rate=0.01, steps=10,
                        data_parallel=4, grad_accumulation=2, communicator=ranks, callbacks=[stop, xf.print_every(10)])
if ranks.rank == 0:
    print(model.weight.tobytes().hex())
"""


def test_fit_on_ranks(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    outputs = set()
    for count in (1, 4):
        code, output = run(count, tmp_path / "train.py")
        assert code == 0, output
        assert output.count("step 10") == 1
        outputs.add(output.split()[-1])
    assert len(outputs) == 1
