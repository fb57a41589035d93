from __future__ import annotations

import inspect
import re
import signal

import numpy as np
import pytest

import xformer as package
from xformer import memory
from xformer.cli import application
from xformer.errors import DataError

COMMANDS = ["demo", "train", "train-lm", "translate", "summarize", "generate", "score", "inspect", "bench"]


def test_version(xformer):
    done = xformer("--version")
    assert (done.code, done.out, done.err) == (0, f"xformer {package.__version__}\n", "")


@pytest.mark.parametrize("arguments", [[], ["--help"]])
def test_help_names_every_command_and_shows_how_to_begin(xformer, arguments):
    done = xformer(*arguments)
    assert done.code == 0
    assert "xformer train --source" in done.out
    for command in COMMANDS:
        assert re.search(rf"│ {command} ", done.out)


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_each_command_has_an_example(xformer, command):
    done = xformer(command, "--help")
    assert done.code == 0
    assert re.search(rf"^ +.*xformer {command} ?\S*", done.out.split("Usage")[1].split("\n", 1)[1], re.MULTILINE)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trian"], "no such command"),
        (["train", "--sorce", "x"], "no such option"),
        (["train"], "missing option"),
        (["train", "--out", "run", "--seed", "many"], "--seed"),
        (["translate", "--model", "run", "--batch-tokens", "0"], "--batch-tokens"),
        (["demo", "--seconds", "0"], "--seconds"),
        (["inspect", "one", "two"], "unexpected extra argument"),
    ],
)
def test_a_wrong_call_is_one_line_that_says_where_to_look(refused, tmp_path, arguments, message):
    error = refused(*arguments, untouched=tmp_path)
    assert message in error.lower()
    where = f"xformer {arguments[0]}" if arguments[0] in COMMANDS else "xformer"
    assert error.endswith(f"; see: {where} --help\n")


@pytest.mark.parametrize(
    ("raised", "code", "printed"),
    [
        (DataError("two\nlines"), 2, "error: two lines\n"),
        (OSError(13, "Permission denied", "place"), 2, "error: place: Permission denied\n"),
        (OSError("cannot load libx.so"), 2, "error: cannot load libx.so\n"),
        (KeyboardInterrupt(), 128 + signal.SIGINT, ""),
    ],
)
def test_what_becomes_of_errors(capsys, raised, code, printed):
    def command():
        raise raised

    assert application._guarded(command)() == code
    assert capsys.readouterr().err == printed


@pytest.mark.parametrize("limited", [False, True])
def test_running_out_of_memory_says_what_was_asked_for(capsys, monkeypatch, limited):
    def command():
        np.empty(2**58, dtype="uint8")

    if limited:
        monkeypatch.setattr(memory.resource, "getrlimit", lambda kind: (2**40, 2**40))
    assert application._guarded(command)() == 2
    place = r"under this process's limit \(ulimit -v\)" if limited else "on this machine"
    assert re.fullmatch(
        rf"error: out of memory: 256.0 PiB was asked for, and [\d.]+ [GM]iB is free {place}; end other programs, or "
        r"raise the limit\n",
        capsys.readouterr().err,
    )


def test_memory_that_cannot_be_mapped_is_memory(capsys):
    def command():
        raise OSError(12, "Cannot allocate memory")

    assert application._guarded(command)() == 2
    assert capsys.readouterr().err.startswith("error: out of memory: more was asked for than there is")


@pytest.mark.parametrize(
    ("options", "advice"),
    [
        ({"batch_tokens": 4096}, "lower --batch-tokens"),
        ({"recipe": None}, "lower batch_tokens or batch_size in the recipe, or its model"),
    ],
)
def test_the_advice_is_for_the_command_that_ran(capsys, options, advice):
    def command(**options):
        raise MemoryError

    assert application._guarded(command)(**options) == 2
    assert capsys.readouterr().err.endswith(f"; {advice}\n")


def test_what_advice_is_given_by_stays_an_option():
    names = {command.callback.__name__: command.callback for command in application._application().registered_commands}
    for name, option in (("translate", "batch_tokens"), ("generate", "batch_tokens"), ("train_lm", "recipe")):
        assert option in inspect.signature(names[name]).parameters


def test_a_command_without_an_answer_is_done():
    assert application._guarded(lambda: None)() == 0
    assert application._guarded(lambda: 7)() == 7
