from __future__ import annotations

import errno
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer

import xformer as package
from xformer.cli import main
from xformer.errors import DataError

ROOT = Path(__file__).parents[2]
COMMANDS = ["demo", "train", "train-lm", "resume", "translate", "summarize", "generate", "score", "inspect", "bench"]
COMMANDS += ["classify", "transcribe", "embed", "rerank", "export", "check-backend", "verify"]


def test_run_ends_the_process_with_the_exit_code():
    with pytest.raises(SystemExit) as ended:
        main.run(["translate", "--no-such-option"])
    assert ended.value.code == 2


@pytest.mark.parametrize("absent", ["typer", "rich"])
def test_without_the_extra_one_line_says_what_to_install(monkeypatch, capsys, absent):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == absent else find_spec(name))
    assert main.exit_code(["--help"]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err == f'error: the command xformer needs {absent}; run: pip install "array-transformers[cli]"\n'


def test_a_terminal_without_our_letters_is_no_error():
    program = "from xformer.cli import main\nmain.exit_code = lambda arguments: print('zwölf →')\nmain.run()"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env={**os.environ, "PYTHONIOENCODING": "ascii"}, capture_output=True,
        text=True,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, "zw?lf ?\n", "")


# --- Streams and signals ---


# --- Commands and errors ---


def test_version(xformer):
    done = xformer("--version")
    assert (done.code, done.out, done.err) == (0, f"xformer {package.__version__}\n", "")


@pytest.mark.parametrize("arguments", [[], ["--help"]])
def test_help_has_an_example_of_every_command(xformer, arguments):
    done = xformer(*arguments)
    assert done.code == 0
    commands = {*COMMANDS, "serve"}
    assert commands == main.COMMANDS.keys()
    for command, summary in main.COMMANDS.items():
        assert re.search(rf"^  {command} +{re.escape(summary)}$", done.out, re.MULTILINE)
    assert set(re.findall(r"  xformer ([a-z-]+)\s", done.out)) >= commands
    assert set(re.findall(r"xformer ([a-z-]+)\s", str(main.__doc__))) == commands


def test_the_help_of_each_command_has_an_example(xformer):
    for command in COMMANDS:
        done = xformer(command, "--help")
        assert done.code == 0
        usage = done.out.split("Usage")[1].split("\n", 1)[1]
        assert re.search(rf"^ +.*xformer {command} ?\S*", usage, re.MULTILINE)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trian"], "no such command"),
        (["chat"], "no such command 'chat'; use generate --chat"),
        (["train", "--num-heads", "2"], "no such option: --num-heads; use --set model.num_heads=value; see:"),
        (["train-lm", "--d-model", "8"], "no such option: --d-model; use --set model.d_model=value; see:"),
        (["train-lm", "--vocab-size", "8"], "use --set tokenizer.vocab_size=value"),
        (["demo", "--task", "copy"], "no such option: --task; programs for other tasks are in docs/examples/; see:"),
        (["train"], "missing option"),
        (["train", "--out", "run", "--seed", "many"], "--seed"),
        (["inspect", "one", "two"], "unexpected extra argument"),
    ],
)
def test_a_wrong_call_is_one_line_that_says_where_to_look(refused, tmp_path, arguments, message):
    error = refused(*arguments, untouched=tmp_path)
    assert message in error.lower()
    where = f"xformer {arguments[0]}" if arguments[0] in COMMANDS else "xformer"
    assert error.endswith(f"; see: {where} --help\n")


def fail_with(monkeypatch, tmp_path, error):
    """Return the exit code of a command that raises an error."""

    def read_lines(path):
        raise error

    monkeypatch.setattr("xformer.cli.score.read_lines", read_lines)
    return main.exit_code(["score", "--reference", str(tmp_path / "ref")])


@pytest.mark.parametrize(
    ("error", "code", "printed"),
    [
        (DataError("two\nlines"), 2, "error: two lines\n"),
        (OSError(13, "Permission denied", "file"), 2, "error: file: Permission denied\n"),
        (OSError(28, "No space left on device"), 2, "error: cannot write the output: No space left on device\n"),
        (OSError("cannot load libx.so"), 2, "error: cannot load libx.so\n"),
        (typer.Abort(), 130, ""),
    ],
)
def test_errors_are_one_line(monkeypatch, tmp_path, capsys, error, code, printed):
    assert fail_with(monkeypatch, tmp_path, error) == code
    assert capsys.readouterr().err == printed


class OutOfMemoryError(RuntimeError):
    """An exception as torch raises it."""


@pytest.mark.parametrize("error", [
    MemoryError("Unable to allocate 256. PiB"), OutOfMemoryError("CUDA out of memory"),
    RuntimeError("RESOURCE_EXHAUSTED: 1 GiB"),
    RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"),
    OSError(errno.ENOMEM, "Cannot allocate memory"),
])  # fmt: skip
def test_out_of_memory_is_reported_with_advice(monkeypatch, tmp_path, capsys, error):
    assert fail_with(monkeypatch, tmp_path, error) == 2
    message = capsys.readouterr().err
    assert message == (
        f"error: out of memory ({error}); use a smaller batch (batch_tokens, batch_size) or a smaller model\n"
    )


def test_other_errors_are_raised(monkeypatch, tmp_path):
    with pytest.raises(RuntimeError, match=r"^a bug$"):
        fail_with(monkeypatch, tmp_path, RuntimeError("a bug"))


def test_commands_return_exit_codes(monkeypatch):
    for result, code in ((None, 0), (0, 0), (7, 7)):
        monkeypatch.setattr("xformer.cli.demo.demo", lambda result=result: result)
        assert main.exit_code(["demo"]) == code
