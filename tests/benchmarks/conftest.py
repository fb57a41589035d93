"""Interleaved benchmarks without pauses, and computations for tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from xformer.benchmarks import interleaved


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(interleaved, "_PAUSE_SECONDS", 0.0)
    monkeypatch.syspath_prepend(str(Path(__file__).parent))  # implementations import `stub_computations` from here


@pytest.fixture
def no_stray_processes():
    before = children()
    yield
    assert children() <= before


def children():
    """Return the process ids of child processes, on Linux."""
    return {pid for path in Path("/proc/self/task").glob("*/children") for pid in path.read_text().split()}
