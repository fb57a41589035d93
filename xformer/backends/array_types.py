"""Types of arrays, dtypes, devices and namespaces, for annotations."""

from __future__ import annotations

from typing import Any

Namespace = Any
Array = Any
DType = Any
Device = Any
