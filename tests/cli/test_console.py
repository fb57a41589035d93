from __future__ import annotations

import shutil
import sys

import pytest

from xformer.cli.console import make_console, plural, program


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """An xformer program below the working directory, as an environment has it."""
    monkeypatch.delenv("NOX_CURRENT_SESSION", raising=False)
    monkeypatch.chdir(tmp_path)
    path = tmp_path / ".nox" / "demo" / "bin" / "xformer"
    path.parent.mkdir(parents=True)
    path.write_text("#!/bin/sh\n")
    monkeypatch.setattr(sys, "argv", [str(path)])
    return path


def test_the_program_on_the_path_is_called_by_its_name(installed, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: str(installed))
    assert program() == "xformer"


def test_in_a_nox_session_the_path_is_told(installed, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: str(installed))
    monkeypatch.setenv("NOX_CURRENT_SESSION", "demo")
    assert program() == ".nox/demo/bin/xformer"


def test_off_the_path_the_path_is_told(installed, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert program() == ".nox/demo/bin/xformer"


def test_as_a_module(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/somewhere/xformer/__main__.py"])
    assert program().endswith(" -m xformer")


def test_text_is_printed_as_it_is(capsys):
    make_console().print("[red]17[/red] " + "x" * 300)
    make_console(stderr=True).print("aside")
    printed = capsys.readouterr()
    assert printed.out == "[red]17[/red] " + "x" * 300 + "\n"
    assert printed.err == "aside\n"


def test_plural():
    assert [plural(count, "line") for count in (0, 1, 2, 1234)] == ["0 lines", "1 line", "2 lines", "1,234 lines"]
