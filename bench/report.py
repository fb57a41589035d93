"""Write a report of benchmark runs: `python bench/report.py DIR [--results bench/results]`.

DIR contains the JSON files of `pytest bench --benchmark-only --results DIR` or `xformer bench --out`. The report is
RESULTS/<date>-<machine>.md. Its tables are marked for the page of benchmarks, which draws them (docs/benchmarks.py).
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

from xformer.benchmarks.report import format_cells, format_label, machine_line

RESULTS = Path(__file__).with_name("results")
TOPICS = {  # the suites by their heading on the page of benchmarks
    "Attention": ("attention", "memory", "multi-head-attention"),
    "Layers and small models": ("encoder", "small-model"),
    "Training steps": ("language-model", "multi30k-recipe", "train-step"),
    "Decoding": ("decoding", "language-model-decoding"),
    "Size and start-up": ("import",),
    "GPU": ("gpu",),
}
HEAD = (
    "| workload | implementation | time (quartiles) | tokens/s | GFLOP/s | of GEMM | memory | ratio (quartiles) |\n"
    "|---|---|---|---|---|---|---|---|"
)
METHOD = (
    "Each implementation runs in a process of its own, on the same cores, and the processes take turns. Times are "
    "medians. A ratio is the median, over the rounds, of the time of an implementation divided by the time of the "
    'first one: above 1, the first one is faster. "of GEMM" is relative to the fastest matrix product measured on this '
    "machine. Memory is the peak beyond inputs and weights. Results were compared before anything was timed.\n\n"
    "    pytest bench --benchmark-only -s --results DIR"
)


def make_report(runs: list[dict[str, Any]]) -> str:
    """Return the report in Markdown."""
    processor = f"{runs[0]['machine']['processor']}, {runs[0]['machine']['threads']} threads"
    parts = [f"# {processor}, {runs[0]['date']}", machine_line(runs[0]), METHOD]
    for run in runs:
        name = run["suite"].capitalize().replace("-", " ")
        parts.append(f"## {name}")
        if run["results"]:
            topic = next((topic for topic, suites in TOPICS.items() if run["suite"] in suites), None)
            mark = [f"<!-- benchmarks: {topic} | {name}, {processor} -->"] if topic else []
            parts.append("\n".join([*mark, HEAD, *rows(run)]))
        missing = sorted({reason for result in run["results"] for reason in result["unavailable"].values()})
        parts += [f"- {line}" for line in (*run["notes"], *missing)]
    return "\n\n".join(parts) + "\n"


def rows(run: dict[str, Any]) -> list[str]:
    """Return one table row for each implementation of each workload."""
    lines = []
    for result in run["results"]:
        for index, measurements in enumerate(result["implementations"]):
            workload = f"{result['workload']} ({result['rounds']} rounds)" if index == 0 else ""
            time, times, *cells, ratio, ratios = format_cells(measurements, run["gemm_flops_per_second"])
            row = [workload, format_label(measurements), f"{time} ({times})", *cells, f"{ratio} ({ratios})"]
            lines.append("| " + " | ".join(row) + " |")
    return lines


def report_name(run: dict[str, Any]) -> str:
    """Return <date>-<machine>: the processor in letters and digits, and the number of threads."""
    processor = re.sub(r"[^a-z0-9]+", "-", run["machine"]["processor"].lower()).strip("-")
    return f"{run['date']}-{processor}-{run['machine']['threads']}-threads"


def write(folder: Path, results: Path) -> Path:
    """Write the report; return its path."""
    files = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))]
    runs = [run for run in files if "suite" in run]
    if not runs:
        sys.exit(f"error: {folder} contains no results; expected those of `pytest bench --benchmark-only --results`")
    written = results / f"{report_name(runs[0])}.md"
    written.write_text(make_report(runs), encoding="utf-8")
    return written


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
