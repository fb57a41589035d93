"""The examples of the documentation run, and its pages show them, the newest results, and name files that exist.

python tests/test_docs.py  # copies changed examples, what code prints, and tables of results and names to the pages
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import io
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from markdown_it import MarkdownIt
from markdown_it.common.utils import escapeHtml

from xformer import native

ROOT = Path(__file__).parents[1]
FILES = sorted(path for path in (ROOT / "docs" / "examples").rglob("*") if path.suffix in (".py", ".html"))
EXAMPLES = [path for path in FILES if path.parent.name == "examples"]  # tests/cli runs those in folders
PAGES = sorted((ROOT / "docs").rglob("*.md"))
EXAMPLE_ON_PAGE = re.compile(r'^(```\w+ title="(docs/examples/[^"]*)"\n).*?^(```)$', flags=re.DOTALL | re.MULTILINE)
# An example on a page, and what it prints.
LINES = r"(?:(?!```).*\n)*"
OUTPUT_ON_PAGE = re.compile(
    rf'^(```python title="(?P<name>docs/examples/[^"]*)"\n{LINES}```\n)(?:\n```text\n(?P<text>{LINES})```\n)?',
    re.MULTILINE,
)
RESULTS_ON_PAGE = re.compile(
    r"^(<!-- table of the newest (bench/results/\*-[\w-]+\.md) -->\n\n).*?(\n<!-- end of the table -->)$",
    flags=re.DOTALL | re.MULTILINE,
)
# A block of code, and what it prints.
PRINTED = re.compile(r"^```python\n(?P<code>.*?)^```$(?:\n\n^```text\n(?P<text>.*?)^```$)?", re.DOTALL | re.MULTILINE)
PRINTING = [page for page in PAGES if any(match["text"] for match in PRINTED.finditer(page.read_text("utf-8")))]
NEEDS_FUSED_PRODUCTS = "use_reproducible_algorithms("


def run_example(example: Path, folder: Path) -> str:
    """Return what an example prints."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-W", "error", str(example)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout


def kinds_of_lines(text: str) -> set[str]:
    """Return the lines of a text without numbers and addresses of files, which depend on the machine."""
    lines = [line for line in text.splitlines() if not line.startswith("step ")]  # appear by the clock
    return {re.sub(r"-?\d[\d.,:]*(e[-+]?\d+)?|\s+", " ", re.sub(r"/\w+/\S+", "/", line)) for line in lines}


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_example_runs(example: Path, tmp_path: Path) -> None:
    for use, package in (("xf.tensorboard(", "tensorboardX"), ("import sklearn", "sklearn")):
        if use in example.read_text(encoding="utf-8"):
            pytest.importorskip(package)
    if NEEDS_FUSED_PRODUCTS in example.read_text(encoding="utf-8") and not native.has_fused_products():
        pytest.skip("needs the library for AVX2, AVX-512 or NEON")
    name, texts = example.relative_to(ROOT).as_posix(), [page.read_text(encoding="utf-8") for page in PAGES]
    (shown,) = [each["text"] or "" for text in texts for each in OUTPUT_ON_PAGE.finditer(text) if each["name"] == name]
    printed = kinds_of_lines(run_example(example, tmp_path))
    # Without a library, there are fewer lines.
    assert printed <= kinds_of_lines(shown), (
        f"{name} prints other lines than on its page; run python tests/test_docs.py"
    )
    assert bool(printed) == bool(shown)


def with_output(page: str, old: str) -> str:
    """Return the text of a page with what examples print that were changed, or have no output there."""

    def replace(match: re.Match[str]) -> str:
        if (match["text"] and match[0] in old) or ROOT / match["name"] not in EXAMPLES:
            return match[0]
        with tempfile.TemporaryDirectory() as folder:
            printed = re.sub(r"/tmp/\w+", "/tmp/run", run_example(ROOT / match["name"], Path(folder)))
        return f"{match[1]}\n```text\n{printed}```\n" if printed else match[1]

    return OUTPUT_ON_PAGE.sub(replace, page)


def with_files(page: str) -> str:
    """Return the text of a page with the present code of the examples, and the tables of the newest results."""
    page = EXAMPLE_ON_PAGE.sub(lambda match: match[1] + (ROOT / match[2]).read_text(encoding="utf-8") + match[3], page)
    return RESULTS_ON_PAGE.sub(lambda match: match[1] + newest_table(match[2]) + match[3], page)


def newest_table(pattern: str) -> str:
    """Return the first paragraph and the table of the newest file of results, or a note that there is none."""
    *_, newest = [None, *sorted(ROOT.glob(pattern))]
    if newest is None:
        return "Not measured yet.\n"
    _, first, *rest = newest.read_text(encoding="utf-8").strip().split("\n\n")
    return f"{first}\n\n{next(part for part in rest if part.startswith('|'))}\n"


def test_pages_show_the_examples_and_results() -> None:
    shown = set()
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        assert with_files(text) == text, f"{page.name} shows an older file; run python tests/test_docs.py"
        shown |= {match[2] for match in EXAMPLE_ON_PAGE.finditer(text)}
    assert shown == {path.relative_to(ROOT).as_posix() for path in FILES}


def with_printed(page: str) -> str:
    """Return the text of a page whose blocks of code, run in order, are followed by what they print."""
    names: dict[str, object] = {"__name__": "__main__"}

    def run(match: re.Match[str]) -> str:
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(compile(match["code"], "a page", "exec"), names)
        text = f"\n\n```text\n{printed.getvalue()}```" if printed.getvalue() else ""
        return f"```python\n{match['code']}```{text}"

    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        return PRINTED.sub(run, page)


@pytest.mark.parametrize("page", PRINTING, ids=lambda path: path.stem)
def test_pages_show_what_their_code_prints(page: Path) -> None:
    pytest.importorskip("scipy")
    text = page.read_text(encoding="utf-8")
    assert with_printed(text) == text, "if the page is right, run: python tests/test_docs.py"


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_pages_name_files_that_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for name in re.findall(r"`((?:docs|xformer|bench|tests)/[\w./-]*)`", text):
        assert (ROOT / name).exists(), f"{page.name} names {name}"


# What only the site's Markdown understands, as it would stand in the text of another view of the repository.
LEFTOVERS = re.compile(
    r"""^(===|!!!|\?\?\?\+?)\ +["\w] | ^::: | --8<-- | ^\[TOC\] | \]\[  # tabs, boxes, and what is inserted
    | \{:?\ *([.\#][\w-]+|\w+=) | \{[{%] | \#only-(light|dark)""",
    re.MULTILINE | re.VERBOSE,
)
FORMULA = re.compile(r"\$\$.+?\$\$|\$[^$\n]+\$", re.DOTALL)


def leftovers(page: str) -> list[str]:
    """Return what a page would show raw in a view that knows CommonMark, tables and formulas, and nothing else."""
    parser = MarkdownIt("commonmark").enable("table")
    page = re.sub(r"\A---\n.*?\n---\n", "", page, flags=re.DOTALL)  # metadata, which such views show as a table
    found = []
    for token in parser.parse(page):
        if token.type == "code_block":  # indented, as the text of a tab or a box; code has fences
            found.append(token.content)
        elif token.type == "fence" and re.search(r"\bsource=\W?none", token.info):
            found.append(token.info)  # code that the site hides
        elif token.type in ("inline", "html_block"):
            nodes = [node for node in token.children or [token] if node.type != "code_inline"]
            shown = ["\n" if node.type == "softbreak" else node.content for node in nodes]
            addresses = [str(value) for node in nodes for value in node.attrs.values()]
            found += [line for line in [*"".join(shown).splitlines(), *addresses] if LEFTOVERS.search(line)]
            source = re.sub(r"`[^`]*`", "", token.content)
            found += re.findall(r"\[\^.*?\]", source)  # footnotes
            found += [each for each in FORMULA.findall(source) if parser.renderInline(each) != escapeHtml(each)]
    return found


@pytest.mark.parametrize("page", [*sorted(ROOT.glob("*.md")), *PAGES], ids=lambda path: str(path.relative_to(ROOT)))
def test_pages_need_nothing_but_commonmark(page: Path) -> None:
    assert leftovers(page.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    "text",
    [
        '=== "NumPy"\n\n    ```python\n    1\n    ```',
        "!!! note\n    A note.",
        '??? "More"\n    Text.',
        "Text.\n{ .lead }",
        '![A picture](a.png){ width="10" }',
        "![A picture](a.png#only-dark)",
        "::: xformer.layers",
        "See [`fit`][xformer.fit].",
        "A note.[^1]\n\n[^1]: Here.",
        '```python source="none"\n1\n```',
        "$a\\_b$",
        "$a *b* c$",
    ],
)
def test_pages_that_need_more_are_refused(text: str) -> None:
    assert leftovers(f"# Title\n\nText, `{{.code}}` and $a_1$.\n\n{text}\n\nEnd.\n") != []


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def test_tables_of_libraries_are_those_of_the_reports() -> None:
    tables = load("library_tables")
    for name in tables.PAGES:
        page = (ROOT / "docs" / name).read_text(encoding="utf-8")
        assert tables.with_tables(page) == page, f"run: python docs/library_tables.py, which changes {name}"
        assert re.search(r"^\|( ?---[ |])+", page, re.MULTILINE)


def with_summaries(page: str) -> str:
    """Return a page of the API reference with all public names in its tables, and the present summaries."""
    tables = load("reference_pages")
    for name in {match[1] for match in tables.TABLE.finditer(page)}:
        module = importlib.import_module(name)
        own = [key for key, value in vars(module).items() if getattr(value, "__module__", "") == name]
        public = getattr(module, "__all__", [key for key in own if not key.startswith("_")])
        known = {
            key for match in tables.TABLE.finditer(page) if match[1] == name for key in tables.NAME.findall(match[2])
        }
        missing = [f"| `{key}` | |\n" for key in public if key not in known]
        *_, last = (match for match in tables.TABLE.finditer(page) if match[1] == name)
        page = page[: last.end()] + "".join(missing) + page[last.end() :]

        def row(match: re.Match[str], module: ModuleType = module, public: list[str] = public) -> str:
            value = getattr(module, match[1], None)
            documented = isinstance(value, ModuleType) or getattr(value, "__module__", "").startswith("xformer")
            lines = (inspect.getdoc(value) or "").split("\n\n")[0].splitlines() if documented else [match[2]]
            return f"| `{match[1]}` | {' '.join(lines)} |\n" * (match[1] in public)

        def table(match: re.Match[str], name: str = name, row: Any = row) -> str:
            return re.sub(r"^\| `(\w+)` \| ?(.*?) ?\|\n", row, match[0], flags=re.M) if match[1] == name else match[0]

        page = tables.TABLE.sub(table, page)
    return page


@pytest.mark.parametrize("page", sorted((ROOT / "docs" / "reference").glob("*.md")), ids=lambda path: path.stem)
def test_reference_lists_all_public_names(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert with_summaries(text) == text, "run python tests/test_docs.py, and move new names to their topics"


@pytest.fixture
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "docs")
    return load("benchmarks")


def test_every_topic_of_the_benchmarks_has_a_table_with_ratios(benchmarks: ModuleType) -> None:
    pages = [page.read_text(encoding="utf-8") for page in (ROOT / "docs" / "benchmarks").glob("*.md")]
    topics = [match[1] for page in pages for match in benchmarks.MARK.finditer(page)]
    tables = benchmarks.measurements()
    assert {table.topic for table in tables} == {*topics}
    for table in tables:
        assert {len(row) for row in table.rows} == {len(table.rows[0])}, f"{table.name}: {table.title}"
        assert all(0.01 < benchmarks.number(ratio) < 1000 for *_, ratio in table.ratios)
    for topic in topics:
        drawn = [table.ratios or "minutes" in table.rows[0] for table in tables if table.topic == topic]
        assert any(drawn), f"no figure of {topic}"


def test_a_newer_result_replaces_the_one_of_the_same_title(benchmarks: ModuleType, monkeypatch, tmp_path) -> None:
    rows = (
        "| work | xformer | ratio: torch | ratio: JAX |\n|---|---|---|---|\n| `a` | 1 ms | **0.82** (0.8 to 0.9) | |\n"
    )
    text = f"# Machine, date\n\nVersions.\n\n## One\n\n<!-- benchmarks: Speed | Layers -->\nText.\n\n{rows}\n## Two\n"
    (tmp_path / "2026-01-02-b.md").write_text(text)
    (tmp_path / "2026-01-01-a.md").write_text(text.replace("0.82", "0.11"))
    monkeypatch.setattr(benchmarks, "RESULTS", tmp_path)
    (table,) = benchmarks.measurements()
    assert (table.heading, table.introduction, table.text) == ("Machine, date", "Versions.", f"Text.\n\n{rows.strip()}")
    assert table.ratios == [("a", "torch", "0.82")]
    with pytest.raises(ValueError, match="expected a number"):
        benchmarks.number("0.6, 0.8")
    with pytest.raises(ValueError, match="no table of the topic 'Size'"):
        benchmarks.section("Size")


def test_the_logo_is_the_icon_of_the_explorer() -> None:
    icons = [ROOT / "docs" / "assets" / "icon.svg", ROOT / "xformer" / "serve" / "static" / "icon.svg"]
    assert icons[0].read_bytes() == icons[1].read_bytes()


if __name__ == "__main__":
    for path in PAGES:
        text = path.read_text(encoding="utf-8")
        shown = with_output(with_summaries(with_files(text)), text)
        path.write_text(with_printed(shown) if path in PRINTING else shown, encoding="utf-8", newline="\n")
