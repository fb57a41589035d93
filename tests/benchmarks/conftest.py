"""Interleaved benchmarks without pauses, and computations for tests."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from xformer.benchmarks import interleaved


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(interleaved, "_PAUSE_SECONDS", 0.0)
    monkeypatch.syspath_prepend(str(Path(__file__).parent))  # implementations import `stub_computations` from here


@pytest.fixture
def no_stray_processes():
    yield
    if sys.platform == "linux":
        children = Path("/proc/self/task").glob("*/children")
        assert all(not path.read_text().split() for path in children)
