"""Turn measured runs into a page: `python bench/report.py DIR [--results bench/results]`.

DIR holds the JSON files that `pytest bench --benchmark-only --results DIR` wrote, or `xformer bench --out`. The page
is RESULTS/<date>-<machine>.md, with its pictures beside it.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

from xformer.benchmarks.report import cells, label, machine_line
from xformer.cli.bench_plot import draw_ratios

RESULTS = Path(__file__).with_name("results")
HEAD = (
    "| case | contender | time | quartiles | tokens/s | GFLOP/s | of GEMM | memory | ratio | quartiles |\n"
    "|---|---|---|---|---|---|---|---|---|---|"
)
METHOD = (
    "Contenders work in processes of their own, on the same cores, and take turns; times are medians. A ratio is the "
    "median, over the turns, of a contender's time divided by that of the first one of its case: above 1, the first "
    'one is faster. "of GEMM" is the share of the fastest matrix product measured on this machine; memory is what the '
    "work takes beside its inputs and weights, at most. Answers were compared before anything was timed."
)


def page(runs: list[dict[str, Any]], pictures: dict[str, str]) -> str:
    """The page in Markdown. pictures: of each work that has one, the name of its file."""
    parts = [f"# Benchmarks, {runs[0]['date']}", machine_line(runs[0]), METHOD]
    for run in runs:
        parts.append(f"## {run['work'].capitalize().replace('-', ' ')}")
        if run["work"] in pictures:
            parts.append(f"![each contender's time against the first one's]({pictures[run['work']]})")
        if run["results"]:
            parts.append("\n".join([HEAD, *rows(run)]))
        missing = sorted({reason for result in run["results"] for reason in result["absent"].values()})
        parts += [f"- {line}" for line in (*run["notes"], *missing)]
    return "\n\n".join(parts) + "\n"


def rows(run: dict[str, Any]) -> list[str]:
    """One line of a table for each contender of each case."""
    found = []
    for result in run["results"]:
        for place, figures in enumerate(result["contenders"]):
            case = f"{result['case']} ({result['turns']} turns)" if place == 0 else ""
            found.append(
                "| " + " | ".join([case, label(figures), *cells(figures, run["gemm_flops_per_second"])]) + " |"
            )
    return found


def name_of(run: dict[str, Any]) -> str:
    """<date>-<machine>: the processor in letters and digits, and the number of threads."""
    processor = re.sub(r"[^a-z0-9]+", "-", run["machine"]["processor"].lower()).strip("-")
    return f"{run['date']}-{processor}-{run['machine']['threads']}-threads"


def write(folder: Path, results: Path) -> Path:
    """Write page and pictures; returns the page."""
    runs = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))]
    if not runs:
        sys.exit(f"error: {folder} holds no JSON files; expected those of `pytest bench --benchmark-only --results`")
    name = name_of(runs[0])
    pictures = {run["work"]: f"{name}-{run['work']}.png" for run in runs if run["results"]}
    for run in runs:
        if run["work"] in pictures:
            draw_ratios(run, results / pictures[run["work"]])
    written = results / f"{name}.md"
    written.write_text(page(runs, pictures), encoding="utf-8")
    return written


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="DIR", help="where the JSON files are")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where the page goes (default bench/results)")
    options = parser.parse_args()
    print(write(options.folder, options.results))


if __name__ == "__main__":
    main()
