"""The public API stands in public_api.txt, so that a change of a signature, a bound or an option shows in review.

It is what docs/reference documents, and the command line. Types are not in the file: tests/typing has them.

`python tests/test_api.py` writes the file.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from pathlib import Path
from typing import Any

from typer.main import get_command

from xformer.cli.main import COMMANDS, _make_app
from xformer.config import Config, options_of

FILE = Path(__file__).parent / "public_api.txt"
REFERENCE = sorted((Path(__file__).parents[1] / "docs" / "reference").glob("*.md"))
MODULES = sorted(
    {"xformer", *(name for page in REFERENCE for name in re.findall(r"<!-- reference: (\S+) -->", page.read_text()))}
)


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


def own_names(cls: type) -> set[str]:
    """Return the names that a class defines, or its private bases for it."""
    bases = cls.__mro__[1:]
    private = {key for base in bases if base.__name__.startswith("_") for key in vars(base)}
    return {*vars(cls)} | private.difference(*(dir(base) for base in bases if not base.__name__.startswith("_")))


def lines_of(module_name: str) -> list[str]:
    """Return a line for each public name of a module, and for each public method of its classes."""
    module = importlib.import_module(module_name)
    own = [name for name, value in vars(module).items() if getattr(value, "__module__", "") == module_name]
    lines = []
    for name in sorted(getattr(module, "__all__", [name for name in own if not name.startswith("_")])):
        value, path = getattr(module, name), f"{module_name}.{name}"
        lines.append(f"{path}{signature(value)}" if callable(value) else path)
        if inspect.isclass(value) and value.__module__.startswith("xformer"):
            for key in sorted(key for key in own_names(value) if hasattr(value, key) and not key.startswith("_")):
                member = getattr(value, key, None)
                text = signature(member) if inspect.isroutine(member) else bounds(value).get(key, "")
                lines.append(f"{path}.{key}{text}")
    return lines


def command_options(command: str) -> list[str]:
    """Return a line for each option of a command."""
    parameters = get_command(_make_app([command])).commands[command].params  # type: ignore[attr-defined]
    return sorted(f"xformer {command} {'/'.join([*each.opts, *each.secondary_opts])}" for each in parameters)


def public_api() -> str:
    """Return the public API; names that the top level repeats from a package stand at the top level only."""
    lines = lines_of("xformer")
    known = {line.removeprefix("xformer.") for line in lines}
    for path in MODULES:
        lines += [line for line in lines_of(path) if line.removeprefix(f"{path}.") not in known]
    lines += [line for command in COMMANDS for line in command_options(command)]
    return "".join(f"{line}\n" for line in lines)


def test_public_api_is_that_of_the_file():
    expected, received = FILE.read_text().splitlines(), public_api().splitlines()
    removed = [f"- {line}" for line in expected if line not in set(received)]
    added = [f"+ {line}" for line in received if line not in set(expected)]
    changes = "\n".join([*removed, *added])
    assert expected == received, f"the public API changed; if intended, run python tests/test_api.py:\n{changes}"


def test_modules_of_one_file_list_their_public_names():
    for name in ("distributed", "interpret", "native"):
        module = importlib.import_module(f"xformer.{name}")
        assert dir(module) == sorted(module.__all__)


if __name__ == "__main__":
    FILE.write_text(public_api())
    sys.stdout.write(f"{FILE}: {len(FILE.read_text().splitlines())} lines\n")
