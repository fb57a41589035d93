"""Checks of array libraries as tests: `pytest -p xformer.pytest_plugin --xformer-library numpy`.

There is no entry point, since pytest would then import a part of xformer in every project of an environment. Without
its option the plugin does nothing.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


def pytest_addoption(parser: Any) -> None:
    """Add the options."""
    group = parser.getgroup("xformer", "checks of array libraries")
    group.addoption("--xformer-library", action="append", default=[], metavar="MODULE", help="check it; repeatable")
    group.addoption("--xformer-skip-dtype", action="append", default=[], metavar="NAME", help="not checked; repeatable")
    group.addoption("--xformer-time-limit", type=float, default=60.0, metavar="SECONDS", help="of each check")
    group.addoption("--xformer-report", type=Path, metavar="FILE", help="write the report there as Markdown")


def pytest_configure(config: Any) -> None:
    """Collect the checks, instead of the tests of the project unless paths are given."""
    if config.option.xformer_library:
        if (report := config.option.xformer_report) and (report.is_dir() or not report.parent.is_dir()):
            raise pytest.UsageError(f"--xformer-report is {report}; expected a file in a directory that exists")
        config.args = [*(config.args if config.args_source is config.ArgsSource.ARGS else ()), __file__]


def pytest_collect_file(file_path: Path, parent: Any) -> Any:
    """Collect the checks where pytest comes to this file."""
    is_wanted = file_path == Path(__file__) and parent.config.option.xformer_library
    return LibraryChecks.from_parent(parent, path=file_path, nodeid="xformer") if is_wanted else None


class LibraryChecks(pytest.File):
    """The checks of all libraries."""

    def collect(self) -> Iterator[Any]:
        """Yield an item for each check."""
        from xformer import testing
        from xformer.errors import XformerError

        limit, skipped = self.config.option.xformer_time_limit, self.config.option.xformer_skip_dtype
        for library in self.config.option.xformer_library:
            try:
                checks = testing.checks_of(library, testing.GROUPS, limit, skipped)
            except XformerError as error:
                raise self.CollectError(str(error)) from error
            for group, name, run in checks:
                yield LibraryCheck.from_parent(self, name=f"{library} {group}: {name}", library=library, run=run)


class LibraryCheck(pytest.Item):
    """One check of a library."""

    def __init__(self, *, library: str, run: Any, **options: Any) -> None:
        super().__init__(**options)
        self.library, self.run = library, run

    def runtest(self) -> None:
        """Run the check; dtypes are optional."""
        check = self.run()
        self.user_properties.append((self.library, dataclasses.asdict(check)))
        if check.status == "lacks" or (check.group == "dtypes" and check.status != "ok"):
            pytest.skip(check.detail)
        if check.status != "ok":
            pytest.fail(f"{check}\nrepeat it: {check.reproduction}", pytrace=False)

    def reportinfo(self) -> tuple[Path, None, str]:
        """Name the check in headings."""
        return self.path, None, self.name


def pytest_terminal_summary(terminalreporter: Any, config: Any) -> None:
    """Print the failures by their causes, and the times of all parts."""
    found: dict[str, list[dict[str, Any]]] = {library: [] for library in config.option.xformer_library}
    for report in itertools.chain(*terminalreporter.stats.values()):
        for name, check in getattr(report, "user_properties", ()) if getattr(report, "when", "") == "call" else ():
            if name in found:
                found[name].append(check)
    if any(found.values()):
        from xformer.testing import Check, report_of

        reports = (report_of(library, [Check(**each) for each in checks]) for library, checks in found.items())
        text = "\n".join(report.to_markdown() for report in reports)
        terminalreporter.write("\n" + text)
        if config.option.xformer_report:
            config.option.xformer_report.write_text(text, encoding="utf-8")
