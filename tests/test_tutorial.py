"""The code of the tutorial's pages runs, the solutions of the exercises included."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
SLOW = {"9-model", "10-decoding", "11-translator", "appendix-libraries"}  # pages that take more than three seconds
PAGES = [
    pytest.param(page, id=page.stem, marks=[pytest.mark.slow] * (page.stem in SLOW))
    for page in sorted((ROOT / "docs" / "tutorial").glob("*.md"))
]


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("page", PAGES)
def test_cells_run(page: Path) -> None:
    matplotlib = pytest.importorskip("matplotlib", reason="the tutorial draws with matplotlib")
    execution = load("execution")
    namespace: dict[str, Any] = {"__name__": "tutorial"}
    with matplotlib.rc_context():
        execution.use_figure_style()
        try:
            for number, cell in enumerate(execution.code_cells(page), start=1):
                exec(compile(cell, f"{page.name}, cell {number}", "exec"), namespace)
                execution.take_figures()  # draws them
        finally:
            execution.take_figures()


@pytest.mark.parametrize("page", PAGES)
def test_solutions_are_checked(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    solution = r"^<details markdown>\n<summary>Solution</summary>\n.*?^</details>\n"
    exercises, solutions = (re.findall(p, text, re.M | re.S) for p in (r"^\*\*Exercise \d+\.\*\*", solution))
    checked = re.findall(solution + r"\n```python\n[^`]*assert ", text, re.M | re.S)
    assert len(exercises) == len(solutions) == len(checked)
