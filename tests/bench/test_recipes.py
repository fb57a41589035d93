"""Data is checked before anything is trained."""

from __future__ import annotations

import importlib
import subprocess
from pathlib import Path

import pytest

from tests.bench.conftest import BENCH


def make_data(folder, *names):
    folder.mkdir()
    for name in names:
        (folder / name).write_text("a\n")


@pytest.fixture
def recipes():
    assert BENCH.is_dir()
    return importlib.import_module("recipes")


def test_missing_data_is_refused_in_one_line(recipes, tmp_path, capsys):
    make_data(tmp_path / "deep", "train.en", "train.de", "val.en", "val.de", "test_2016_flickr.en")
    make_data(tmp_path / "elsewhere", "test_2016_flickr.de", "input.txt")
    assert recipes.main([str(tmp_path / "runs"), str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith(
        f"error: no directory in {tmp_path} contains train.en, train.de, val.en, val.de, "
    )
    assert not (tmp_path / "runs").exists()


def test_commands(recipes, tmp_path, monkeypatch, capsys):
    """Train on a GPU by default; stop at the first command that fails."""
    commands = []

    def run(command, **settings):
        commands.append(list(map(str, command)))
        raise subprocess.CalledProcessError(7, command)

    names = [*recipes.SIDES.values(), *recipes.TEST]
    make_data(tmp_path / "multi30k", *names)
    make_data(tmp_path / "text", "input.txt")
    monkeypatch.setattr(recipes.subprocess, "run", run)
    assert recipes.main([str(tmp_path / "runs"), str(tmp_path), "--max-minutes", "4"]) == 7
    (command,) = commands
    assert command[-6:] == ["--backend", "cupy", "--precision", "bfloat16", "--max-minutes", "4"]
    assert Path(command[command.index("--recipe") + 1]).is_file()
    assert command[command.index("--source") + 1] == str(tmp_path / "multi30k" / "train.en")
    assert not capsys.readouterr().out
