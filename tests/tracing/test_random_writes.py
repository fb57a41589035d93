"""Random programs that write in place have the values and derivatives of eager execution, or are refused; few are."""

from __future__ import annotations

import importlib.util
import os

import pytest

from tests.tracing.random_writes import Counts, run

SEED = int(os.environ.get("XFORMER_WRITES_SEED", "0"))


def check(libraries: list[str], count: int, *, faults: int = 1) -> Counts:
    installed = [name for name in libraries if importlib.util.find_spec(name) is not None]
    counts = run(installed, SEED, is_done=lambda checked: checked >= count, most_faults=faults)
    assert not counts.faults, "\n".join(counts.faults)
    return counts


@pytest.mark.parametrize(("library", "count"), [("numpy", 100), ("torch", 40)])
def test_random_writes(library, count):
    pytest.importorskip(library)
    check([library], count)


@pytest.mark.slow
def test_at_most_one_in_twenty_is_refused():
    counts = check(["numpy", "torch"], 1200)
    for library in ("numpy", "torch"):
        assert counts.programs[library, "ordinary"] >= 400
        assert counts.refused(library) <= 0.05, str(counts)
