"""Pages of the API reference, and the address of the site, as a hook of MkDocs.

Below each table of names stands what their docstrings say. A line `<!-- reference: MODULE -->` stands before a table of
public names of a module, grouped by topic. The tables of a module have all of its names; `python tests/test_docs.py`
writes the summaries, and appends names that are missing.
"""

from __future__ import annotations

import importlib
import re
from types import ModuleType
from typing import Any

TABLE = re.compile(r"^<!-- reference: (\S+) -->\n((?:^\|.*\n)+)", re.MULTILINE)
NAME = re.compile(r"^\| `(\w+)` \|", re.MULTILINE)


def with_entries(match: re.Match[str]) -> str:
    """Return a table whose names, but for constants, are links to their documentation, which follows."""
    module, table = match.groups()
    values = vars(importlib.import_module(module))
    names = [name for name in NAME.findall(table) if is_documented(name, values[name])]
    for name in names:
        # A function that has the name of its module takes the place of the module.
        path = ".".join([module, name, *[name] * (getattr(values[name], "__module__", "") == f"{module}.{name}")])
        table = table.replace(f"| `{name}` |", f"| [`{name}`][{path}] |")
    return "\n".join([table, *(f"::: {module}.{name}\n" for name in names)])


def is_documented(name: str, value: Any) -> bool:
    """Return whether a value is documented under this name: it is neither a constant nor another name of a class."""
    return value.__name__ == name if isinstance(value, type) else callable(value) or isinstance(value, ModuleType)


def on_config(config: Any) -> Any:
    """Derive the address of the site from that of a repository on GitHub; without a repository, no page has a link."""
    github = re.fullmatch(r"https://github\.com/([\w.-]+)/([\w.-]+?)/?", config.repo_url or "")
    if github and not config.site_url:
        config.site_url = f"https://{github[1].lower()}.github.io/{github[2]}/"
    if not config.repo_url:
        config.edit_uri = None
    return config


def on_page_markdown(markdown: str, *, page: Any, **arguments: Any) -> str:
    """Document the names of all tables: a hook of MkDocs."""
    return TABLE.sub(with_entries, markdown)
