"""Hints for names of other libraries: what to use in place of them, from the tables of hints.txt."""

from __future__ import annotations

from pathlib import Path


def _read(path: Path) -> dict[str, dict[str, str]]:
    """Return the tables of a file by their names; each has the hint for every name."""
    tables: dict[str, dict[str, str]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            table = tables[line.strip("[]")] = {}
        elif line and not line.startswith("#"):
            names, _, hint = line.partition(": ")
            table |= dict.fromkeys(names.split(), hint)
    return tables


_TABLES = _read(Path(__file__).with_suffix(".txt"))
ARGUMENTS = {name: tuple(ours.split()) for name, ours in _TABLES["arguments"].items()}
GENERATION, MODEL_CALL, ARRAYS, MODULES, PACKAGE, ATTENTION, ATTENTION_CALL = (
    _TABLES[name]
    for name in ("generation", "model call", "arrays", "modules", "package", "attention", "attention call")
)
MOVED = {package: _TABLES[package] for package in ("xformer.backends", "xformer.families", "xformer.layers")}
