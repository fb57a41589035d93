"""Rules of the house that the source itself can be asked about: rooms, sizes, names, versions.

The rules are written out in CONTRIBUTING.md; the rooms are drawn in docs/architecture.md.
"""

from __future__ import annotations

import ast
import graphlib
import importlib
import re
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "xformer").rglob("*.py"))

# From the top of the house down: a file imports only from its own room and from rooms above it. The longest
# name that fits wins, so `kernels` is here twice: the registry, which operations ask for a kernel, and the
# kernels themselves, which know the operations. `__init__` is the public API, xformer/__init__.py.
ROOMS = [
    "errors",
    "files",
    "namespace",
    "namespace_cupy",
    "host",
    "memory",
    "gaps",
    "cuda_launch",
    "random",
    "tree",
    "storage",
    "autodiff",
    "kernels.registry",
    "ops",
    "kernels",
    "masks",
    "layers",
    "models",
    "text",
    "generation",
    "training",
    "pipelines",
    "__init__",
    "benchmarks",
    "cli",
    "__main__",
]
# Rooms that see less than all that is above them.
NARROW_ROOMS = {"text": {"errors", "files", "text"}}

ARRAY_LIBRARIES = {"cupy", "cupyx", "jax", "numpy", "torch"}
ROOMS_WITH_ARRAY_LIBRARIES = {
    "namespace": ARRAY_LIBRARIES,
    "host": ARRAY_LIBRARIES,
    "gaps": ARRAY_LIBRARIES,
    "random": ARRAY_LIBRARIES,
    "storage": ARRAY_LIBRARIES,
    "kernels.registry": ARRAY_LIBRARIES,
    "kernels": ARRAY_LIBRARIES,
    "text": {"numpy"},
    "cli": {"numpy"},
}

MOST_FUNCTION_LINES = 40
MOST_FILE_LINES = 300
MOST_ARGUMENTS = 8
# The sizes are guides, not walls: what is better off larger stands here with its reason, as
# "xformer/file.py", "xformer/file.py:function" or "xformer/file.py:Class.method".
SIZE_EXCEPTIONS: dict[str, str] = {
    "xformer/cli/bench.py:bench": "typer reads the options, with their help, from the signature",
    "xformer/cli/train.py:train": "typer reads the options, with their help, from the signature",
    "xformer/cli/train_lm.py:train_lm": "typer reads the options, with their help, from the signature",
    "xformer/kernels/cupy_attention.py:forward": "the operation's arrays and settings",
    "xformer/kernels/cupy_cudnn.py:_forward": "the operation's arrays and settings",
    "xformer/kernels/numpy_attention.py:_forward": "the operation's arrays and settings",
    "xformer/kernels/numpy_attention_tiled.py:_forward": "the operation's arrays and settings",
    "xformer/kernels/numpy_compiled_attention.py:_forward": "the operation's arrays and settings",
    "xformer/kernels/numpy_compiled_attention_loops.py:_divide": "a loop is given all that it reads and writes",
    "xformer/kernels/numpy_compiled_attention_loops.py:attend": "a loop is given all that it reads and writes",
    "xformer/kernels/numpy_compiled_attention_loops.py:attend_once": "a loop is given all that it reads and writes",
    "xformer/kernels/numpy_compiled_attention_vjp_loops.py:pull_back": "a loop is given all that it reads and writes",
    "xformer/kernels/numpy_compiled_attention_vjp_loops.py:pull_back_parts": "one pass over tiles, six products each",
    "xformer/kernels/numpy_compiled_tiles.py:_tile.tile": "a loop is given all that it reads and writes",
    "xformer/kernels/numpy_compiled_tiles.py:multiply": "a loop is given all that it reads and writes",
    "xformer/kernels/numpy_compiled_matmul_loops.py:multiply": "a loop is given all that it reads and writes",
    "xformer/kernels/numpy_compiled_tiles.py:_tile": "all of a tile, from the first number read to the last written",
    "xformer/kernels/numpy_compiled_loops.py:adam": "the operation's arrays and settings",
    "xformer/ops/adafactor.py:_forward": "the operation's arrays and settings",
    "xformer/ops/attention.py:_forward": "the operation's arrays and settings",
    "xformer/generation/decode.py:decode": "what may differ from sentence to sentence",
    "xformer/ops/attention.py:attention": "the operation's arrays and settings",
    "xformer/training/step.py:train_step": "all that a step depends on",
}

# What tells where a file was written rather than what it does. Split, so that this file passes its own test.
MACHINE_PATHS = ["/" + "work/", "/" + "root/", "/" + "home/"]


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in SOURCES}
PACKAGES = sorted(name for name, path in MODULES.items() if path.name == "__init__.py")


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def imported_names(tree: ast.AST) -> Iterator[str]:
    """Every module or member that the source imports, as a dotted name, inside functions too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def project_imports(tree: ast.AST) -> set[str]:
    """The modules of xformer that the source imports; the last name of an import may be a member of one."""
    names = (name for name in imported_names(tree) if name.split(".")[0] == "xformer")
    return {name if name in MODULES else name.rpartition(".")[0] for name in names}


def room_of(module: str) -> str:
    """The room of a module, from its name; a module without a room fails the test that asks."""
    # Importing the registry imports its package, so the package may know no more than the registry.
    entrances = {"xformer": "__init__", "xformer.__main__": "cli", "xformer.kernels": "kernels.registry"}
    if module in entrances:
        return entrances[module]
    inside = module.removeprefix("xformer.")
    rooms = [room for room in ROOMS if inside == room or inside.startswith(f"{room}.")]
    if not rooms:
        pytest.fail(f"{module} has no room; give it a place in ROOMS")
    return max(rooms, key=len)


@pytest.mark.parametrize("module", sorted(MODULES))
def test_a_file_imports_only_from_rooms_above_its_own(module):
    room = room_of(module)
    visible = NARROW_ROOMS.get(room, set(ROOMS[: ROOMS.index(room) + 1]))
    below = {name for name in project_imports(parse(MODULES[module])) if room_of(name) not in visible}
    assert below == set(), f"{module} stands in room {room!r}, which sees {sorted(visible)}"


def test_modules_do_not_import_each_other_in_circles():
    graph = {module: project_imports(parse(path)) - {module} for module, path in MODULES.items()}
    try:
        order = list(graphlib.TopologicalSorter(graph).static_order())
    except graphlib.CycleError as error:
        pytest.fail(f"circular import: {' <- '.join(error.args[1])}")
    assert set(order) >= set(MODULES)


@pytest.mark.parametrize("module", sorted(MODULES))
def test_array_libraries_stay_in_their_rooms(module):
    allowed = ROOMS_WITH_ARRAY_LIBRARIES.get(room_of(module), set())
    libraries = {name.split(".")[0] for name in imported_names(parse(MODULES[module]))} & ARRAY_LIBRARIES
    assert libraries <= allowed


def functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Every function with its name, which says where it stands: "Trainer.step"."""
    for node in ast.iter_child_nodes(tree):
        inner = prefix
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            inner = f"{prefix}{node.name}."
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield f"{prefix}{node.name}", node
        yield from functions(node, inner)


def docstring_lines(tree: ast.AST) -> set[int]:
    """The lines that docstrings stand on."""
    lines: set[int] = set()
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
            and ast.get_docstring(node) is not None
        ):
            lines.update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    return lines


def function_size(node: ast.FunctionDef | ast.AsyncFunctionDef, source: list[str]) -> int:
    """Lines from `def` to the end that hold code: no docstring, blank line or comment."""
    code = set(range(node.lineno, (node.end_lineno or 0) + 1)) - docstring_lines(node)
    return sum(1 for line in code if source[line - 1].strip() and not source[line - 1].lstrip().startswith("#"))


def argument_count(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Named arguments, without self and cls."""
    named = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    return len([argument for argument in named if argument.arg not in {"self", "cls"}])


def oversized() -> dict[str, str]:
    """Files and functions over a size guide, each with what is too large about it."""
    found = {}
    for path in SOURCES:
        name = path.relative_to(ROOT).as_posix()
        source = path.read_text(encoding="utf-8").splitlines()
        if len(source) > MOST_FILE_LINES:
            found[name] = f"{len(source)} lines"
        for function, node in functions(parse(path)):
            lines, arguments = function_size(node, source), argument_count(node)
            if lines > MOST_FUNCTION_LINES or arguments > MOST_ARGUMENTS:
                found[f"{name}:{function}"] = f"{lines} lines of code, {arguments} arguments"
    return found


def test_sizes_keep_to_the_guides():
    surprises = [f"{name}: {size}" for name, size in oversized().items() if name not in SIZE_EXCEPTIONS]
    assert not surprises, "make smaller, or list in SIZE_EXCEPTIONS with a reason:\n" + "\n".join(surprises)


def test_every_listed_size_exception_still_is_one():
    assert SIZE_EXCEPTIONS.keys() <= oversized().keys()


def test_one_version_everywhere():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    citation = re.findall(r"^version: (\S+)$", (ROOT / "CITATION.cff").read_text(encoding="utf-8"), re.MULTILINE)
    changelog = re.findall(r"^## \[([\d.]+)\]", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert citation == [project["version"]]
    assert changelog[0] == project["version"]
    assert importlib.import_module("xformer").__version__ == project["version"]


def public_names(package: str) -> tuple[set[str], set[str]]:
    """What a package's __init__ defines or imports from xformer without underscore; and its own submodules.

    A submodule may be imported just to be loaded, so whether to offer its name is open.
    """
    names: set[str] = set()
    submodules: set[str] = set()
    for node in parse(MODULES[package]).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.ImportFrom) and node.module == package:
            submodules.update(alias.asname or alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "xformer":
            names.update(alias.asname or alias.name for alias in node.names)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names.update(target.id for target in targets if isinstance(target, ast.Name))
    return {name for name in names if not name.startswith("_")}, submodules


@pytest.mark.parametrize("package", PACKAGES)
def test_all_names_what_a_package_offers(package):
    exported = getattr(importlib.import_module(package), "__all__", [])
    names, submodules = public_names(package)
    assert len(exported) == len(set(exported))
    assert set(exported) - {"__version__"} - submodules == names


def test_no_file_names_a_place_on_the_machine_it_was_written_on():
    listing = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if listing.returncode:
        pytest.skip("not a git checkout: nothing says which files belong to the project")
    found = []
    for name in listing.stdout.splitlines():
        if not (ROOT / name).is_file():
            continue
        content = (ROOT / name).read_bytes()
        found += [f"{name}: {place}" for place in MACHINE_PATHS if place.encode() in content]
    assert found == []
