"""The public API stands in public_api.txt, so that a change of a signature or of a bound shows in review.

`python tests/test_api.py` writes the file.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from pathlib import Path
from typing import Any

from xformer.config import Config, options_of

FILE = Path(__file__).parent / "public_api.txt"
PACKAGES = ("data", "distributed", "export", "families", "generation", "interpret", "layers", "masks", "models", "ops")
PACKAGES += ("pipelines", "random", "runs", "testing", "text", "tokenizers", "tracing", "training", "tree")


def signature(value: Any) -> str:
    """Return the parameters of a function or class, with defaults; addresses of objects are left out."""
    try:
        found = inspect.signature(value)
    except (TypeError, ValueError):
        return ""
    without_types = [each.replace(annotation=inspect.Parameter.empty) for each in found.parameters.values()]
    text = str(found.replace(parameters=without_types, return_annotation=inspect.Signature.empty))
    return re.sub(r" at 0x[0-9a-f]+", "", text)


def bounds(value: Any) -> dict[str, str]:
    """Return the bounds of the fields of a configuration, as in " >= 0.0 < 1.0"."""
    if not issubclass(value, Config):
        return {}
    signs = {"at_least": ">=", "above": ">", "at_most": "<=", "below": "<"}
    return {
        field.name: "".join(
            f" {signs[key]} {bound}" for key, bound in field.metadata["bounds"].items() if bound is not None
        )
        for _, _, _, field in options_of(value)
    }


def lines_of(module_name: str) -> list[str]:
    """Return a line for each public name of a module, and for each public method of its classes."""
    module = importlib.import_module(module_name)
    lines = []
    for name in sorted(module.__all__):
        value, path = getattr(module, name), f"{module_name}.{name}"
        lines.append(f"{path}{signature(value)}" if callable(value) else path)
        if inspect.isclass(value) and value.__module__.startswith("xformer"):
            for key in sorted(key for key in vars(value) if not key.startswith("_")):  # not those of base classes
                member = getattr(value, key, None)
                text = signature(member) if inspect.isroutine(member) else bounds(value).get(key, "")
                lines.append(f"{path}.{key}{text}")
    return lines


def public_api() -> str:
    """Return the public API; names that the top level repeats from a package stand at the top level only."""
    top = lines_of("xformer")
    known = {line.removeprefix("xformer.") for line in top}
    lines = list(top)
    for package in PACKAGES:
        path = f"xformer.{package}"
        if hasattr(importlib.import_module(path), "__all__"):
            lines += [line for line in lines_of(path) if line.removeprefix(f"{path}.") not in known]
    return "".join(f"{line}\n" for line in lines)


def test_public_api_is_that_of_the_file():
    expected, received = FILE.read_text().splitlines(), public_api().splitlines()
    removed = [f"- {line}" for line in expected if line not in set(received)]
    added = [f"+ {line}" for line in received if line not in set(expected)]
    changes = "\n".join([*removed, *added])
    assert expected == received, f"the public API changed; if intended, run python tests/test_api.py:\n{changes}"


if __name__ == "__main__":
    FILE.write_text(public_api())
    sys.stdout.write(f"{FILE}: {len(FILE.read_text().splitlines())} lines\n")
