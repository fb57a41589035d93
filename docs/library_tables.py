"""Write the tables of array libraries into the pages of the documentation: `python docs/library_tables.py`.

The data are JSON files: those of `xformer check-backend MODULE --json` in docs/libraries/check-backend/, and those of
`nox -s conformance -- --library NAME --out FILE` in docs/libraries/conformance/, and those of
`xformer bench all --out FILE` in docs/libraries/bench/.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from xformer.benchmarks.report import format_markdown

DOCS = Path(__file__).parent
PAGES = ("array-libraries.md", "how-to/array-library.md", "how-to/differentiate.md")
TABLE = re.compile(r"(<!-- table of docs/library_tables.py: ([\w-]+) -->\n).*?(<!-- end of the table -->)", re.DOTALL)
RESULTS = ("supported", "partly", "fails", "refused")
SIGNS = {"passes": "✓", "library fails": "library", "fails": "fails", "skipped": "skipped"}


def reports(kind: str) -> list[dict[str, Any]]:
    """Return the reports of a kind."""
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted((DOCS / "libraries" / kind).glob("*.json"))]


def table(header: list[str], rows: list[list[str]]) -> str:
    """Return a table in Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)


def result(report: dict[str, Any]) -> str:
    """Return whether a library is supported, computes some checks, none, or is refused at once."""
    if "error" in report:
        return "refused"
    computed = [check["status"] for check in report["checks"] if check["group"] not in ("files", "other", "dtypes")]
    return "supported" if report["passed"] else "partly" if "ok" in computed else "fails"


def reason(report: dict[str, Any]) -> str:
    """Return what does not pass: the dtypes that the library lacks, and the names of the checks of each error."""
    if "error" in report:
        return re.sub(r"^.* standard; (?=it lacks)", "", report["error"])
    lacks = [check["name"] for check in report["checks"] if check["status"] == "lacks" and "(" not in check["name"]]
    names: dict[str, list[str]] = {}
    for check in report["checks"]:
        if check["status"] in ("fails", "differs"):
            names.setdefault(check["detail"].split(";")[0][:110].strip(), []).append(check["name"])
    parts = [f"no {' or '.join(lacks)}"] if lacks else []
    for why, each in names.items():
        more = f" and {len(each) - 3} more" if each[3:] else ""
        parts.append(f"{', '.join(each[:3])}{more}: {why}")
    return "; ".join(parts[:4]) + ("; and others" if parts[4:] else "")


def check_backend_table() -> str:
    """Return the table of all libraries that `xformer check-backend` was run on."""
    rows = []
    for report in sorted(reports("check-backend"), key=lambda each: (RESULTS.index(result(each)), each["library"])):
        checks = report.get("checks", ())
        count = f"{sum(check['status'] == 'ok' for check in checks)} of {len(checks)}" if checks else ""
        rows.append([f"`{report['library']}`", report["version"], result(report), count, reason(report)])
    return table(["Library", "Version", "Result", "Checks", "What does not pass"], rows)


def conformance_table() -> str:
    """Return the table of functions and libraries; functions with the same outcomes share a row."""
    libraries = reports("conformance")
    names = sorted({name for report in libraries for name in report["functions"]})
    groups: dict[tuple[str, ...], list[str]] = {}
    for name in names:
        outcomes = tuple(SIGNS[report["functions"].get(name, "skipped")] for report in libraries)
        if {*outcomes} != {"skipped"}:
            groups.setdefault(outcomes, []).append(name)
    rows = [
        [f"{len(group)}: " + ", ".join(f"`{name}`" for name in group), *outcomes]
        for outcomes, group in sorted(groups.items(), key=lambda item: -len(item[1]))
    ]
    return table(["Functions", *(f"{report['library']} {report['version']}" for report in libraries)], rows)


def bench_table() -> str:
    """Return the times of all parts and libraries on each machine."""
    texts = []
    for run in reports("bench"):
        machine = run["machine"]
        versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
        place = f"{machine['processor']}, {machine['threads']} threads, {run['date']}: {versions}.\n"
        texts.append("\n".join([place, *format_markdown(run)[1:], ""]))
    return "\n" + "\n".join(texts)


def derivatives_table() -> str:
    """Return the table of functions of other packages: those with right gradients, and why the others have none."""
    report = json.loads((DOCS / "libraries" / "derivatives.json").read_text(encoding="utf-8"))
    packages: dict[str, dict[str, list[str]]] = {}
    for name, states in report["functions"].items():
        package, short = split_name(name)
        lacks = [library for library, state in states.items() if state != "right"]
        state = states["numpy"] if "numpy" in lacks else f"except on {' and '.join(lacks)}" if lacks else "right"
        packages.setdefault(package, {}).setdefault(state, []).append(f"`{short}`")
    rows = []
    for package, groups in packages.items():
        right = ", ".join(groups.pop("right", []))
        partly = [f"{state}: {', '.join(names)}" for state, names in groups.items() if state.startswith("except")]
        others = [f"{', '.join(names)} ({state})" for state, names in groups.items() if not state.startswith("except")]
        rows.append([f"`{package}`", "; ".join(filter(None, [right, *partly])), "; ".join(others)])
    return table(["Package", "Right", "Without a gradient"], rows)


def split_name(name: str) -> tuple[str, str]:
    """Return the package of a function, and its name there."""
    if name.startswith("sklearn "):
        return "sklearn", name.removeprefix("sklearn ")
    words = name.split(",")[0].split(" ")[0].split(".")
    package = ".".join(words[: 2 if words[0] in ("scipy", "xp") or words[:2] == ["sklearn", "preprocessing"] else 1])
    package = "sklearn.metrics" if name.startswith("sklearn.metrics") else package
    return package, name.removeprefix(f"{package}.")


def with_tables(page: str) -> str:
    """Return the text of a page with its tables made again."""
    tables = {"check-backend": check_backend_table, "conformance": conformance_table, "bench": bench_table}
    tables["derivatives"] = derivatives_table
    return TABLE.sub(lambda match: match[1] + tables[match[2]]() + match[3], page)


if __name__ == "__main__":
    for name in PAGES:
        path = DOCS / name
        path.write_text(with_tables(path.read_text(encoding="utf-8")), encoding="utf-8")
