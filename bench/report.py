"""Write a report of benchmark runs: `python bench/report.py DIR [--results bench/results]`.

DIR contains the JSON files of `pytest bench --benchmark-only --results DIR` or `xformer bench --out`. The report is
RESULTS/<date>-<machine>.md, with its plots next to it.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

from xformer.benchmarks.report import format_cells, format_label, machine_line
from xformer.cli._plots import save
from xformer.text.extras import new_figure

RESULTS = Path(__file__).with_name("results")
HEAD = (
    "| workload | implementation | time | quartiles | tokens/s | GFLOP/s | of GEMM | memory | ratio | quartiles |\n"
    "|---|---|---|---|---|---|---|---|---|---|"
)
METHOD = (
    "Each implementation runs in a process of its own, on the same cores, and the processes take turns. Times are "
    "medians. A ratio is the median, over the rounds, of the time of an implementation divided by the time of the "
    'first one: above 1, the first one is faster. "of GEMM" is relative to the fastest matrix product measured on this '
    "machine. Memory is the peak beyond inputs and weights. Results were compared before anything was timed."
)


def make_report(runs: list[dict[str, Any]], plots: dict[str, str]) -> str:
    """Return the report in Markdown; plots maps suites to file names."""
    parts = [f"# Benchmarks, {runs[0]['date']}", machine_line(runs[0]), METHOD]
    for run in runs:
        parts.append(f"## {run['suite'].capitalize().replace('-', ' ')}")
        if run["suite"] in plots:
            parts.append(f"![time of each implementation relative to the first]({plots[run['suite']]})")
        if run["results"]:
            parts.append("\n".join([HEAD, *rows(run)]))
        missing = sorted({reason for result in run["results"] for reason in result["unavailable"].values()})
        parts += [f"- {line}" for line in (*run["notes"], *missing)]
    return "\n\n".join(parts) + "\n"


def rows(run: dict[str, Any]) -> list[str]:
    """Return one table row for each implementation of each workload."""
    lines = []
    for result in run["results"]:
        for index, measurements in enumerate(result["implementations"]):
            workload = f"{result['workload']} ({result['rounds']} rounds)" if index == 0 else ""
            cells = format_cells(measurements, run["gemm_flops_per_second"])
            lines.append("| " + " | ".join([workload, format_label(measurements), *cells]) + " |")
    return lines


def report_name(run: dict[str, Any]) -> str:
    """Return <date>-<machine>: the processor in letters and digits, and the number of threads."""
    processor = re.sub(r"[^a-z0-9]+", "-", run["machine"]["processor"].lower()).strip("-")
    return f"{run['date']}-{processor}-{run['machine']['threads']}-threads"


def write(folder: Path, results: Path) -> Path:
    """Write report and plots; return the path of the report."""
    files = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))]
    runs = [run for run in files if "suite" in run]
    if not runs:
        sys.exit(f"error: {folder} contains no results; expected those of `pytest bench --benchmark-only --results`")
    name = report_name(runs[0])
    plots = {run["suite"]: f"{name}-{run['suite']}.png" for run in runs if run["results"]}
    for run in runs:
        if run["suite"] in plots:
            draw_ratios(run, results / plots[run["suite"]])
    written = results / f"{name}.md"
    written.write_text(make_report(runs, plots), encoding="utf-8")
    return written


def draw_ratios(run: dict[str, Any], path: Path) -> None:
    """Plot the time of each implementation divided by that of the first one, with quartiles.

    Args:
        run: As returned by `xformer.benchmarks.make_run`.
        path: The PNG file to write.

    Raises:
        CheckpointError: If the file cannot be written.
    """
    results = run["results"][::-1]  # the first workload at the top
    names = list(dict.fromkeys(each["name"] for result in run["results"] for each in result["implementations"][1:]))
    figure = new_figure(8.5, 1.3 + 0.32 * len(results) + 0.05 * len(names))
    axes = figure.subplots()
    for index, name in enumerate(names):
        offset = 0.3 * (index / max(1, len(names) - 1) - 0.5)  # separates the implementations of a workload
        points = [
            (row - offset, each)
            for row, result in enumerate(results)
            for each in result["implementations"]
            if each["name"] == name
        ]
        ratios = [each["ratio"] for _, each in points]
        errors = [[abs(each["ratio"] - each["ratio_quartiles"][side]) for _, each in points] for side in (0, 1)]
        rows = [row for row, _ in points]
        axes.errorbar(ratios, rows, xerr=errors, fmt="o", markersize=4, elinewidth=0.8, color=f"C{index}", label=name)
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_yticks(range(len(results)), [result["workload"] for result in results], fontsize="small")
    reference = run["results"][0]["implementations"][0]["name"]
    axes.set_xlabel(f"time / time of {reference} (above 1: {reference} is faster)", fontsize="small")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize="small", loc="lower center", bbox_to_anchor=(0.4, 1.0), ncols=3)
    save(figure, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="DIR", help="directory of the JSON files")
    parser.add_argument(
        "--results", type=Path, default=RESULTS, help="directory of the report (default: bench/results)"
    )
    options = parser.parse_args()
    print(write(options.folder, options.results))


if __name__ == "__main__":
    main()
