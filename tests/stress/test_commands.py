"""Invalid options: every command ends with exit code 0 or 2 and at most one error line, and changes no input."""

from __future__ import annotations

import contextlib
import io
import shutil
import sys

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st

from tests.stress.conftest import contents, limits
from tests.stress.test_files import CHECKPOINTS, copy_of, make_run, make_wav
from xformer.cli import main
from xformer.cli.main import exit_code

COMMANDS = {name: typer.main.get_command(main._make_app([name])).commands[name] for name in main.COMMANDS}
INPUTS = ("run", "train.source", "train.target", "valid.source", "valid.target", "empty", "binary", "latin1", "a.wav")
VALUES = ["", "0", "1", "-1", "2", "3.5", "nan", "inf", "1e400", "9" * 30, "x", "a" * 300, "--", "-", "é", "a,b", "{}"]
VALUES += [
    "float32", "web", "int8", "numpy", "missing/file", "/", ".", "..", "/dev/null", "huggingface", "tensorboard",
    "none",
]  # fmt: skip
# Enough to run each command; {} is the directory of the inputs.
ARGUMENTS = {
    "train": "--source {}/train.source --target {}/train.target --valid-source {}/valid.source "
    "--valid-target {}/valid.target --recipe {}/recipe.toml --max-steps 1 --out out",
    "train-lm": "--text {}/train.source --d-model 8 --num-heads 2 --d-ff 8 --num-layers 1 --max-steps 1 --out out",
    "resume": "{}/run",
    "translate": "--model {}/run --input {}/valid.source --max-new-tokens 3",
    "summarize": "--model {}/run --input {}/valid.source --max-new-tokens 3",
    "transcribe": "--model {}/run {}/a.wav",
    "generate": "--model {}/gpt2 --prompt a --max-new-tokens 3",
    "generate, a piped prompt and a draft model": "--model {}/gpt2 --draft-model {}/gpt2 --max-new-tokens 3",
    "embed": "--model {}/run --input {}/valid.source --output out.npy",
    "rerank": "--model {}/run --query a --input {}/valid.source",
    "check-backend": "numpy --group other --json",
    "classify": "--model {}/run --input {}/valid.source",
    "score": "--reference {}/valid.target --hypothesis {}/valid.target",
    "inspect": "{}/run",
    "export": "{}/run out",
    "export, a page": "{}/run out --format web",
}
ENDLESS = {"demo", "verify", "bench", "serve"}  # they train, measure or serve until they are stopped


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    path = tmp_path_factory.mktemp("inputs")
    make_run(path)
    make_wav(path)
    (path / "gpt2").mkdir()
    copy_of(CHECKPOINTS / "gpt2", "config.json", "model.safetensors")(path / "gpt2")
    (path / "empty").touch()
    (path / "binary").write_bytes(bytes(range(256)) * 4)
    (path / "latin1").write_bytes("größer\r\nals\n".encode("latin-1"))
    return path


def test_all_commands_are_tested():
    assert set(COMMANDS) == {*(name.split(",")[0] for name in ARGUMENTS), *ENDLESS}


@pytest.mark.parametrize("case", ARGUMENTS)
@given(data=st.data())
def test_invalid_options_are_refused_in_one_line(case, data, inputs, tmp_path_factory):
    name = case.split(",")[0]
    names = [option for parameter in COMMANDS[name].params for option in parameter.opts if option.startswith("--")]
    value = (
        st.sampled_from(VALUES)
        | st.sampled_from([str(inputs / each) for each in INPUTS])
        | st.text(st.characters(exclude_characters="\0"), max_size=5)
    )
    option = st.tuples(st.sampled_from([*names, "--unknown"]), value | st.none())
    options = data.draw(st.lists(option, min_size=1, max_size=3))
    arguments = [name, *ARGUMENTS[case].format(*[inputs] * 9).split()]
    arguments += [text for pair in options for text in pair if text is not None]
    directory, before = tmp_path_factory.mktemp("work"), contents(inputs)
    output, errors, stdin = (io.TextIOWrapper(io.BytesIO(content)) for content in (b"", b"", b"a text\n"))
    with (
        contextlib.chdir(directory),
        contextlib.redirect_stdout(output),
        contextlib.redirect_stderr(errors),
        limits(60),
    ):
        sys.stdin, stdin = stdin, sys.stdin
        try:
            code = exit_code(arguments)
        finally:
            sys.stdin = stdin
    shutil.rmtree(directory)
    errors.seek(0)
    printed = errors.read()
    lines = [line for line in printed.splitlines() if line.startswith("error:")]
    assert code in ((0, 1, 2) if name == "check-backend" else (0, 2)), (
        arguments
    )  # 1: a check failed, e.g. by its time limit
    assert len(lines) == (code == 2), printed
    assert all(len(line) <= 1000 for line in lines)
    assert "Traceback" not in printed
    if name != "resume":
        assert contents(inputs) == before, arguments
