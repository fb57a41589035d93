"""Text to train on, a command line to call, and a trained run: small enough that all of it takes seconds."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import pytest

from xformer.cli.main import exit_code
from xformer.data.demo_tasks import numbers_task
from xformer.io import load_arrays
from xformer.training.checkpoint import TrainingFiles

ROOT = Path(__file__).parents[2]
RECIPE = """
[model]
d_model = 16
num_heads = 2
d_ff = 32
num_encoder_layers = 1
num_decoder_layers = 1

[tokenizer]
vocab_size = 100

[training]
batch_tokens = 256
validate_every = 4
max_steps = 6
warmup_steps = 20
"""


class Done(NamedTuple):
    """Exit code and output of a command."""

    code: int
    out: str
    err: str


def open_file(data: bytes) -> TextIO:
    """Return standard input that is a file with these bytes."""
    file = tempfile.TemporaryFile()  # noqa: SIM115 - closed by the caller
    file.write(data)
    file.seek(0)
    return io.TextIOWrapper(file, encoding="utf-8")


def open_pipe(data: bytes) -> TextIO:
    """Return standard input that is a pipe with these bytes, which have to fit into its buffer."""
    reading, writing = os.pipe()
    with open(writing, "wb") as file:
        file.write(data)
    return open(reading, encoding="utf-8")


@pytest.fixture
def xformer(capsysbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Done]:
    """Call the command line in this process."""

    def call(*arguments: object, stdin: bytes = b"", pipe: bool = False) -> Done:
        capsysbinary.readouterr()
        with open_pipe(stdin) if pipe else open_file(stdin) as stream:
            monkeypatch.setattr(sys, "stdin", stream)
            code = exit_code([str(argument) for argument in arguments])
        printed = capsysbinary.readouterr()
        return Done(code, printed.out.decode(), printed.err.decode())

    return call


@pytest.fixture
def refused(xformer: Callable[..., Done]) -> Callable[..., str]:
    """Call a command that must be refused, by one line on stderr, and that leaves `untouched` as it was."""

    def call(*arguments: object, untouched: Path, stdin: bytes = b"") -> str:
        before = contents(untouched)
        done = xformer(*arguments, stdin=stdin)
        assert (done.code, done.out) == (2, "")
        assert done.err.startswith("error: ")
        assert done.err.count("\n") == 1
        assert done.err.endswith("\n")
        assert contents(untouched) == before
        return done.err

    return call


def contents(directory: Path) -> dict[str, bytes | None]:
    """Every file below a directory with its content, and every directory."""
    return {
        str(path.relative_to(directory)): path.read_bytes() if path.is_file() else None
        for path in sorted(directory.rglob("*"))
    }


def write(path: Path, text: str | bytes) -> Path:
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def events(run: Path, name: str) -> list[dict[str, Any]]:
    return [event for event in read_log(run) if event["event"] == name]


def read_log(run: Path) -> list[dict[str, Any]]:
    """Return the events of the log."""
    return TrainingFiles(run).read_log()


def state(run: Path) -> dict[str, bytes]:
    """Model and optimizer state of the last saved state, as bytes."""
    return {name: array.tobytes() for name, array in load_arrays(run / "last.safetensors")[0].items()}


def wait_for_state(process: subprocess.Popen[bytes], run: Path) -> None:
    """Wait until a run in another process has saved its state."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        assert process.poll() is None, process.communicate()
        if (run / "last.safetensors").exists():
            return
        time.sleep(0.01)
    pytest.fail("training did not start")


@pytest.fixture
def start_process(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Start the command line as a process of its own, which ends with the test."""
    started: list[subprocess.Popen[bytes]] = []

    def start(*arguments: object) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, "-m", "xformer", *map(str, arguments)], cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT)}, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )  # fmt: skip
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with train, valid and test in .en and .de, and recipe.toml."""
    directory = tmp_path_factory.mktemp("text")
    task = numbers_task(num_train=400, num_valid=10, num_test=12, largest=9999)
    for name, corpus in (("train", task.train), ("valid", task.valid), ("test", task.test)):
        (directory / f"{name}.en").write_text("\n".join(corpus.source) + "\n", encoding="utf-8")
        (directory / f"{name}.de").write_text("\n".join(corpus.target) + "\n", encoding="utf-8")
    (directory / "recipe.toml").write_text(RECIPE, encoding="utf-8")
    return directory


@pytest.fixture
def train_options(text: Path) -> list[object]:
    """The options of train that name the text and the recipe."""
    names = {"source": "train.en", "target": "train.de", "valid-source": "valid.en", "valid-target": "valid.de"}
    files = [option for name, file in names.items() for option in (f"--{name}", text / file)]
    return [*files, "--recipe", text / "recipe.toml"]


@pytest.fixture(scope="session")
def trained(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run, to be read only; its model has hardly learned anything."""
    out = tmp_path_factory.mktemp("trained") / "run"
    names = {"source": "train.en", "target": "train.de", "valid-source": "valid.en", "valid-target": "valid.de"}
    files = [str(option) for name, file in names.items() for option in (f"--{name}", text / file)]
    assert exit_code(["train", *files, "--recipe", str(text / "recipe.toml"), "--out", str(out)]) == 0
    return out
