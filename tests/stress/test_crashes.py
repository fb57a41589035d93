"""Processes that are killed at random moments, and disks that are full: files stay whole, and results the same bits."""

from __future__ import annotations

import http.client
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.stress.conftest import contents
from tests.stress.test_files import make_run
from xformer.io import load_arrays
from xformer.training.checkpoint import TrainingFiles

ROOT = Path(__file__).parents[2]
TRAIN = (
    "train --source {0}/train.source --target {0}/train.target --valid-source {0}/valid.source --valid-target "
    "{0}/valid.target --recipe {0}/recipe.toml --max-steps 40 --seed 3 --out"
)
AVERAGE = "--set training.keep_checkpoints=3 --set training.checkpoint_every=5 --set training.average=last"
TRANSLATE = "translate --model {0}/run --input {0}/train.source --max-new-tokens 30 --output"
CORPUS = (
    "translate --model {0}/run --input {0}/train.source --max-new-tokens 30 --chunk-lines 6 --workers 2 --corpus-out"
)
EXPORT = "export {0}/run"
SERVE = "serve --model {0}/run --port"


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("inputs")
    make_run(path)
    return path


def start(*arguments: object, **variables: str) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    environment |= variables
    command = [sys.executable, "-m", "xformer", *map(str, arguments)]
    pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, env=environment, **pipes)


def finish(*arguments: object) -> str:
    """Run a command, which must succeed; return what it printed on stderr."""
    process = start(*arguments)
    errors = process.communicate(timeout=300)[1].decode()
    assert process.returncode == 0, errors
    return errors


def kill(after: float, *arguments: object) -> bool:
    """Start a command and kill it; return False if it ended before."""
    process = start(*arguments)
    try:
        process.communicate(timeout=after)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGKILL)
        process.communicate()
        return True
    assert process.returncode == 0
    return False


def check_files(directory: Path) -> None:
    """Read every file of a directory that has its final name."""
    for path in directory.rglob("*"):
        if path.suffix == ".safetensors":
            load_arrays(path)
        elif path.suffix == ".json":
            json.loads(path.read_text(encoding="utf-8"))
    if (directory / "log.jsonl").exists():
        TrainingFiles(directory).read_log()


def final_files(directory: Path) -> dict[str, Any]:
    """Return the files of a run without the log and the time that training took."""
    files = {name: data for name, data in contents(directory).items() if not name.startswith(("log", "last"))}
    arrays = load_arrays(directory / "last.safetensors")[0]
    return files | {name: array.tobytes() for name, array in arrays.items()}


def durations(arguments: list[object], seed: int, number: int) -> Iterator[float]:
    """Run a command once, and draw moments until its end."""
    began = time.monotonic()
    finish(*arguments)
    length = time.monotonic() - began
    draw = random.Random(seed)
    return (draw.uniform(0.3, 1.05) * length for _ in range(number))


@pytest.mark.parametrize("options", ["", AVERAGE], ids=["plain", "average"])
def test_training_that_is_killed_resumes_to_the_same_bits(options, inputs, scale, tmp_path):
    train = TRAIN.format(inputs).replace("--seed", f"{options} --seed").split()
    expected = tmp_path / "expected"
    num_killed = 0
    moments = durations([*train, expected], 0, 4 * scale)
    for number, moment in enumerate(moments):
        run = tmp_path / str(number)
        arguments: list[object] = [*train, run]
        while kill(moment, *arguments):
            num_killed += 1
            check_files(run)
            if (run / "last.safetensors").exists():
                arguments = ["resume", run]
            else:
                shutil.rmtree(run, ignore_errors=True)
            moment *= 1.1
        assert final_files(run) == final_files(expected)
        shutil.rmtree(run)
    assert num_killed


@pytest.mark.parametrize("command", [TRANSLATE, EXPORT])
def test_output_of_a_killed_command_is_whole_or_absent(command, inputs, scale, tmp_path):
    arguments = command.format(inputs).split()
    expected = tmp_path / "expected"
    before = contents(inputs)
    for number, moment in enumerate(durations([*arguments, expected], 1, 6 * scale)):
        output = tmp_path / str(number)
        kill(moment, *arguments, output)
        assert contents(inputs) == before
        if output.is_file():
            assert output.read_bytes() == expected.read_bytes()
        elif output.exists():
            assert contents(output) == contents(expected)
        for path in tmp_path.glob(f"*{number}*"):  # temporary files too
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def test_corpus_run_that_is_killed_loses_and_doubles_no_chunk(inputs, scale, tmp_path):
    corpus = CORPUS.format(inputs).split()
    expected = tmp_path / "expected"
    num_killed = 0
    moments = durations([*corpus, expected], 2, 4 * scale)
    whole = contents(expected)
    for number, moment in enumerate(moments):
        run = tmp_path / str(number)
        while kill(moment, *corpus, run):
            num_killed += 1
            for name, content in contents(run).items() if run.exists() else ():
                assert name.startswith(("log", ".")) or content == whole[name]
            moment *= 1.1
        result = contents(run)
        chunks = [json.loads(line)["chunk"] for line in result.pop("log.jsonl").splitlines()]
        assert len(chunks) == len(set(chunks))
        assert result == {name: content for name, content in whole.items() if name != "log.jsonl"}
    assert num_killed


def test_server_that_is_killed_changes_no_file_and_starts_again_at_the_same_port(inputs, scale):
    pytest.importorskip("starlette")
    before = contents(inputs)
    draw = random.Random(3)
    port = "0"
    for _ in range(2 * scale):
        server = start(*SERVE.format(inputs).split(), port)
        line = next(line for line in server.stderr if b"http://" in line).decode()
        port = line.split("http://127.0.0.1:")[1].split("/")[0].split()[0]
        connections = []
        for _ in range(8):  # some of them are answered, others not
            connection = http.client.HTTPConnection("127.0.0.1", int(port), timeout=30)
            body = json.dumps({"text": ["one two three"], "max_new_tokens": 30})
            connection.request("POST", "/translate", body, {"Content-Type": "application/json"})
            connections.append(connection)
        assert json.loads(connections[0].getresponse().read())["outputs"]
        time.sleep(draw.uniform(0, 0.1))
        server.kill()
        server.communicate()
        for connection in connections:
            connection.close()
        assert contents(inputs) == before


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[int, str], Path]]:
    """Return a function that mounts a disk of some KiB."""
    mounted: list[Path] = []

    def mount(kibibytes: int, options: str = "") -> Path:
        path = tmp_path / f"disk{len(mounted)}"
        path.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={kibibytes}k{options}", "tmpfs", str(path)]
        if subprocess.run(command, capture_output=True, check=False).returncode:
            pytest.skip("disks can only be mounted by root")
        mounted.append(path)
        return path

    yield mount
    for path in mounted:
        subprocess.run(["umount", str(path)], check=False)


@pytest.mark.parametrize("kibibytes", [4, 80, 240])
@pytest.mark.parametrize("command", [TRAIN, TRANSLATE, EXPORT])
def test_a_full_disk_is_reported_in_one_line_and_saved_files_are_whole(command, kibibytes, inputs, small_disk):
    output = small_disk(kibibytes) / "out"
    process = start(*command.format(inputs).split(), output)
    errors = process.communicate(timeout=300)[1].decode()
    lines = [line for line in errors.splitlines() if line.startswith("error:")]
    assert (process.returncode, len(lines)) in ((0, 0), (2, 1)), errors
    assert "Traceback" not in errors
    if output.is_dir():
        check_files(output)
