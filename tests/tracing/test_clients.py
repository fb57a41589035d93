"""Functions that the project did not write have right gradients or raise; see clients.py for the list."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
REPORT = json.loads((ROOT / "docs/libraries/derivatives.json").read_text(encoding="utf-8"))
LIBRARIES = [name for name in ("numpy", "torch", "array_api_strict") if importlib.util.find_spec(name)]


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the states of all functions, computed in a process in which SciPy takes arrays of every library."""
    for name in ("array_api_extra", "einops", "opt_einsum", "scipy", "sklearn"):
        pytest.importorskip(name)
    out = tmp_path_factory.mktemp("clients") / "report.json"
    command = [sys.executable, "-m", "tests.tracing.clients", *LIBRARIES, "--out", str(out)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=600)
    return dict(json.loads(out.read_text(encoding="utf-8")))


def test_functions_of_other_libraries_have_right_gradients_or_raise(report):
    wrong = {name: states for name, states in report["functions"].items() if "wrong" in str(states.values())}
    assert not wrong
    right = [name for name, states in report["functions"].items() if states["numpy"] == "right"]
    assert len(right) > 140


def test_the_page_has_these_states(report):
    if report["versions"] != REPORT["versions"]:
        pytest.skip("other versions of the packages")
    for name, states in report["functions"].items():
        for library, state in states.items():  # without the reasons, which change with the code of the packages
            recorded = REPORT["functions"][name][library].split(":")[0]
            assert state.split(":")[0] == recorded, (
                "run: python -m tests.tracing.clients; python docs/library_tables.py"
            )


def test_most_functions_are_right_on_every_library():
    assert len(REPORT["functions"]) > 230
    for library, least in {"numpy": 170, "torch": 160, "array_api_strict": 150}.items():
        states = [states[library] for states in REPORT["functions"].values()]
        assert states.count("right") > least
        assert not any(state.startswith("wrong") for state in states)
