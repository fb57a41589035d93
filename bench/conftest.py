"""Options and the recorder of the benchmarks: `pytest bench --benchmark-only [--quick] [--results DIR]`."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from race import Recorder


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("xformer")
    group.addoption("--quick", action="store_true", help="three turns, one size of each work")
    group.addoption("--most-turns", type=int, metavar="N", help="of each race (default: what its file says)")
    group.addoption("--results", type=Path, metavar="DIR", help="write one JSON file for each work, for report.py")


@pytest.fixture(scope="session")
def recorder(request: pytest.FixtureRequest) -> Recorder:
    most_turns = 3 if request.config.getoption("--quick") else request.config.getoption("--most-turns")
    return Recorder(request.config.getoption("--results"), most_turns=most_turns)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of each benchmark, leave only the first size where --quick is given."""
    if not config.getoption("--quick"):
        return
    kept: dict[str, pytest.Item] = {}
    for item in items:
        kept.setdefault(item.nodeid.split("[")[0], item)
    config.hook.pytest_deselected(items=[item for item in items if item not in kept.values()])
    items[:] = kept.values()
