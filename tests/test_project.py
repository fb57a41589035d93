"""Checks of the project as a whole: public names, versions, paths. Import layers are checked by `nox -s lint`."""

from __future__ import annotations

import ast
import importlib
import re
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "xformer").rglob("*.py"))

# Prefixes of paths that exist on one machine only. Split, so that this file passes its own test.
MACHINE_PATHS = ["/" + "work/", "/" + "root/", "/" + "home/"]


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in SOURCES}
PACKAGES = sorted(name for name, path in MODULES.items() if path.name == "__init__.py")


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def test_one_version_everywhere():
    """pyproject.toml reads it from xformer/__init__.py."""
    release = r"^version: (\S+)\ndate-released: (\S+)$"
    citation = re.findall(release, (ROOT / "CITATION.cff").read_text(encoding="utf-8"), re.MULTILINE)
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    versions = re.findall(r"^## \[([\d.]+)\] - (\S+)$", changelog, re.MULTILINE)
    assert citation == versions[:1]
    assert importlib.import_module("xformer").__version__ == versions[0][0]
    assert re.findall(r"^## .*", changelog, re.MULTILINE)[0] == "## [Unreleased]"


def test_one_distribution_name_everywhere():
    """The command and the import are called xformer; on the Python Package Index, that name is another project's."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["name"] == "array-transformers"
    assert project["scripts"] == {"xformer": "xformer.cli.main:run"}
    other = re.compile(
        rb"""install\s+(-\S+\s+)*["'`]*xformer\b|\bxformer\\*\[\\*[a-z{]|(version|distribution)\(["']xformer["']\)"""
    )
    matches = [f"{path}: {match[0]!r}" for path, content in project_files() for match in other.finditer(content)]
    assert matches == []


def public_names(package: str) -> tuple[set[str], set[str]]:
    """Return the public names that a package's __init__ defines or imports from xformer, and its own submodules.

    A submodule may be imported only to load it, so its name may or may not be exported.
    """
    names: set[str] = set()
    submodules: set[str] = set()
    body = parse(MODULES[package]).body
    lazy = [node for block in body if isinstance(block, ast.If) for node in block.body]  # if TYPE_CHECKING
    for node in [*body, *lazy]:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.ImportFrom) and node.module == package:
            submodules.update(alias.asname or alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "xformer":
            names.update(alias.asname or alias.name for alias in node.names)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            targets = [each for target in targets for each in getattr(target, "elts", [target])]
            names.update(target.id for target in targets if isinstance(target, ast.Name))
    return {name for name in names if not name.startswith("_")}, submodules


@pytest.mark.parametrize("package", [name for name in PACKAGES if name != "xformer"])  # which has a stub
def test_all_lists_the_public_names_of_a_package(package):
    if package == "xformer.ops.torch":
        pytest.importorskip("torch")
    exported = getattr(importlib.import_module(package), "__all__", [])
    names, submodules = public_names(package)
    assert len(exported) == len(set(exported))
    if package == "xformer.native":  # has code of its own, with names for other modules of xformer
        assert set(exported) < names
    else:
        assert set(exported) - {"__version__"} - submodules == names


def project_files() -> Iterator[tuple[str, bytes]]:
    """Yield the names and contents of the files that git tracks, not those of environments and outputs beside them."""
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True) if shutil.which("git") else None
    names = listing.stdout.decode().split("\0")[:-1] if listing else []
    if not names:
        pytest.skip("not a checkout of git: the files of the project are unknown")
    for name in names:
        if (ROOT / name).is_file():
            yield name, (ROOT / name).read_bytes()


def test_no_file_contains_a_path_of_one_machine():
    matches = [f"{name}: {path}" for name, data in project_files() for path in MACHINE_PATHS if path.encode() in data]
    assert matches == []


def test_workflows_run_sessions_that_exist_and_end():
    yaml = pytest.importorskip("yaml")
    functions = [node for node in parse(ROOT / "noxfile.py").body if isinstance(node, ast.FunctionDef)]
    sessions = {node.name for node in functions if any("session" in ast.unparse(each) for each in node.decorator_list)}
    used = set()
    for path in sorted((ROOT / ".github" / "workflows").glob("*.yml")):
        workflow = yaml.safe_load(path.read_text(encoding="utf-8"))
        assert workflow["permissions"] == {"contents": "read"}
        assert "concurrency" in workflow
        for job in workflow["jobs"].values():
            if "uses" in job:  # another workflow, with its own limits
                assert (ROOT / job["uses"]).exists()
                continue
            assert job["timeout-minutes"] <= 120
            for step in job["steps"]:
                names, _, _ = step.get("with", {}).get("arguments", "").partition("--")
                matrix = job.get("strategy", {}).get("matrix", {})
                used |= {*matrix["session"]} if "matrix.session" in names else {*names.split()}
    assert used <= sessions
    assert {"docs", "families", "lint", "native", "tests", "types", "wheels"} <= used
