"""The examples of the documentation run, and its pages name files that exist."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = sorted(path for path in (ROOT / "docs" / "examples").rglob("*") if path.suffix in (".py", ".html"))
EXAMPLES = [path for path in FILES if path.parent.name == "examples"]  # tests/cli runs those in folders
PAGES = sorted((ROOT / "docs").rglob("*.md"))


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_example_runs(example: Path) -> None:
    for use, package in (("xf.tensorboard(", "tensorboardX"), ("import sklearn", "sklearn")):
        if use in example.read_text(encoding="utf-8"):
            pytest.importorskip(package)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-W", "error", example], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr


def test_every_example_is_on_a_page() -> None:
    included = {name for page in PAGES for name in re.findall(r'--8<-- "(.*)"', page.read_text(encoding="utf-8"))}
    assert included == {str(path.relative_to(ROOT / "docs" / "examples")) for path in FILES}


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_pages_name_files_that_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for name in re.findall(r"`((?:docs|xformer|bench|tests)/[\w./-]*)`", text):
        assert (ROOT / name).exists(), f"{page.name} names {name}"


def test_tables_of_libraries_are_those_of_the_reports() -> None:
    spec = importlib.util.spec_from_file_location("library_tables", ROOT / "docs" / "library_tables.py")
    assert spec is not None
    assert spec.loader is not None
    tables = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tables)
    for name in tables.PAGES.values():
        page = (ROOT / "docs" / name).read_text(encoding="utf-8")
        assert tables.with_tables(page) == page, f"run: python docs/library_tables.py, which changes {name}"
        assert "| --- |" in page


def test_the_logo_is_the_icon_of_the_explorer() -> None:
    icons = [ROOT / "docs" / "assets" / "icon.svg", ROOT / "xformer" / "serve" / "static" / "icon.svg"]
    assert icons[0].read_bytes() == icons[1].read_bytes()
