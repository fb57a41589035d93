"""Transformers written once, against the Python Array API standard, that run and train on any array library."""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from pathlib import Path
from typing import Any

__version__ = "0.3.0"

# Modules of the public names. They are written once, in the file that type checkers read.
_HOMES = {
    line.split()[3]: line.split()[1]
    for line in Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8").splitlines()
    if line.startswith("from ")
}
__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> Any:
    """Import a public name or a module at its first use, so that programs start at once."""
    if find_spec(f"xformer.{name}"):
        return importlib.import_module(f"xformer.{name}")
    if name in _HOMES:
        return globals().setdefault(name, getattr(importlib.import_module(_HOMES[name]), name))
    hint = "" if name.startswith("_") else _hint(name)
    raise AttributeError(f"module 'xformer' has no attribute {name!r}{hint}")


def _hint(name: str) -> str:
    from xformer.hints import PACKAGE

    if name in PACKAGE:
        return f"; use {PACKAGE[name]}"
    for home, known in (("layers", name), ("ops", name.lower())):  # ReLU is relu
        if known in importlib.import_module(f"xformer.{home}").__all__:
            return f"; use xformer.{home}.{known}"
    return ""


def __dir__() -> list[str]:
    return list(__all__)
