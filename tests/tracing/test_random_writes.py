"""Random programs that write in place have the values and derivatives of eager execution, or are refused; few are."""

from __future__ import annotations

import os

import pytest

from tests.tracing.random_writes import run

SEED = int(os.environ.get("XFORMER_WRITES_SEED", "0"))


@pytest.mark.parametrize(("library", "count"), [("numpy", 60), ("torch", 20)])
def test_random_writes(library, count):
    pytest.importorskip(library)
    run(library, SEED, count)


@pytest.mark.slow
@pytest.mark.parametrize(("library", "count"), [("numpy", 200), ("torch", 100)])
def test_few_are_refused(library, count):
    pytest.importorskip(library)
    assert run(library, SEED, count) <= 0.1
