"""Kernels for one test."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from xformer.backends.library import loaded_libraries
from xformer.ops.operation import OPERATIONS, kernels_of, load_kernels


def kernels_by_operation(backend: str) -> dict[str, list[Any]]:
    """Return the kernels of a backend, by the names of their operations."""
    load_kernels(backend)
    return {name: list(kernels_of(name, backend)) for name in OPERATIONS if kernels_of(name, backend)}


def replace_kernels(monkeypatch: Any, backend: str, kernels: Mapping[str, Any]) -> None:
    """Give the operations of a backend other kernels until the test ends; operations that are left out have none."""
    load_kernels(backend)
    for name, operation in OPERATIONS.items():
        monkeypatch.setattr(operation, "kernels", operation.kernels | {backend: list(kernels.get(name, ()))})
    for library in loaded_libraries():
        monkeypatch.setattr(library, "kernels", {})
