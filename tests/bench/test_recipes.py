"""What the recipes' figures are made from is asked for before anything is trained."""

from __future__ import annotations

import importlib

import pytest

from tests.bench.conftest import BENCH


@pytest.fixture
def recipes():
    assert BENCH.is_dir()
    return importlib.import_module("recipes")


def test_absent_data_is_refused_in_one_line(recipes, tmp_path, capsys):
    for name in ("train.en", "train.de", "val.en", "val.de", "test_2016_flickr.en"):
        (tmp_path / "deep").mkdir(exist_ok=True)
        (tmp_path / "deep" / name).write_text("a\n")
    assert recipes.main([str(tmp_path / "runs"), str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"error: {tmp_path} has no test_2016_flickr.de, input.txt\n"
    assert not (tmp_path / "runs").exists()


def test_no_folders_are_refused_in_one_line(recipes, capsys):
    assert recipes.main([]) == 2
    assert capsys.readouterr().err == "error: expected a folder for the runs, then the folder of the data\n"


def test_the_recipes_are_there(recipes):
    for name in ("multi30k-en-de-tiny", "tinyshakespeare-gpu"):
        assert (recipes.RECIPES / f"{name}.toml").is_file()
