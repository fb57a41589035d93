"""Options and recorder of the benchmarks: `pytest bench --benchmark-only [--quick] [--results DIR]`."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from recorder import Recorder


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("xformer")
    group.addoption("--quick", action="store_true", help="three rounds, one size of each benchmark")
    group.addoption("--max-rounds", type=int, metavar="N", help="limit the rounds of each benchmark")
    group.addoption("--results", type=Path, metavar="DIR", help="write one JSON file per suite, for report.py")


@pytest.fixture(scope="session")
def recorder(request: pytest.FixtureRequest) -> Recorder:
    max_rounds = 3 if request.config.getoption("--quick") else request.config.getoption("--max-rounds")
    return Recorder(request.config.getoption("--results"), max_rounds=max_rounds)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep only the first size of each benchmark if --quick is given."""
    if not config.getoption("--quick"):
        return
    selected: dict[str, pytest.Item] = {}
    for item in items:
        selected.setdefault(item.nodeid.split("[")[0], item)
    config.hook.pytest_deselected(items=[item for item in items if item not in selected.values()])
    items[:] = selected.values()
