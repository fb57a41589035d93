"""What the tests of kernels share."""

from __future__ import annotations

import pytest


@pytest.fixture
def uncompiled(monkeypatch):
    """Have the kernels of the library alone serve, where numba is installed, too."""
    monkeypatch.setenv("XFORMER_KERNELS", "uncompiled")
