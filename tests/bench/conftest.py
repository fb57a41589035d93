"""Adds bench/ to the path, since it is not part of the package."""

from __future__ import annotations

from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench"


@pytest.fixture(autouse=True)
def bench_on_the_path(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
