"""What `inspect` has to say about a run."""

from __future__ import annotations

import math
import re
from collections import Counter
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from xformer.cli.console import plural, short
from xformer.io import load_arrays
from xformer.pipelines import Tokenizers
from xformer.training import RunDirectory

_MOST_ROWS = 20  # of the table of validations


def collect(directory: Path) -> dict[str, Any]:
    """Gather everything about a run, JSON-ready; raises CheckpointError when a part is missing or damaged."""
    run = RunDirectory(directory)
    config = run.read_config()
    log = run.read_log()
    return {
        "directory": str(directory),
        "config": config,
        "parameters": _parameters(run),
        "tokenizers": {
            side: {"vocab_size": t.vocab_size, "model": t.model, "lowercase": t.lowercase}
            for side, t in Tokenizers.load(run).by_side().items()
        },
        "validations": [event for event in log if event.get("event") in ("validation", "average")],
        "log": log,
    }


def show(report: dict[str, Any], console: Console) -> None:
    """Print a report as tables."""
    config = report["config"]
    console.print(
        f"{report['directory']}: a run of xformer {config.get('kind')} ({config.get('task', 'translation')}), "
        f"version {config.get('xformer')}, computed with {config.get('backend')}\n"
    )
    console.print(_settings_table(config))
    if report["parameters"]:
        console.print(_parameter_table(report["parameters"]))
    else:
        console.print("no model yet: the run has not reached its first validation")
    for side, facts in report["tokenizers"].items():
        case = "lower-cased" if facts["lowercase"] else "cased"
        side = "" if config.get("task") == "language_modeling" else f"{side} "
        console.print(f"{side}tokenizer: {facts['model']}, {plural(facts['vocab_size'], 'token')}, {case}")
    console.print(_history(report["validations"]))


def _parameters(run: RunDirectory) -> dict[str, int]:
    """Numbers in the model by part: "encoder.0", "source_embedding", ..."""
    if not run.model.exists():
        return {}
    counts: Counter[str] = Counter()
    for name, array in load_arrays(run.model)[0].items():
        first, second, *_ = [*name.split("."), ""]
        counts[f"{first} {second}" if second.isdigit() else first] += math.prod(array.shape)
    return dict(sorted(counts.items(), key=lambda part: _natural(part[0])))


def _natural(name: str) -> list[str | int]:
    """What sorts "encoder 2" before "encoder 10"."""
    return [int(piece) if piece.isdecimal() else piece for piece in re.split(r"(\d+)", name)]


def _settings_table(config: dict[str, Any]) -> Table:
    table = Table(title="Configuration", title_justify="left", show_header=False, box=None, padding=(0, 2))
    tables = {name: table for name, table in config.get("recipe", {}).items() if isinstance(table, dict)}
    sections = {**tables, "data": config.get("counts", {})}
    for section, values in sections.items():
        for row, (key, value) in enumerate(values.items()):
            table.add_row(f"[{section}]" if row == 0 else "", key, "" if value is None else str(value))
    return table


def _parameter_table(parameters: dict[str, int]) -> Table:
    total = sum(parameters.values())
    table = Table(title="\nParameters", title_justify="left", box=None, padding=(0, 2), show_footer=True)
    table.add_column("part", footer="total")
    table.add_column("count", footer=f"{total:,}", justify="right")
    table.add_column("share", justify="right")
    for part, count in parameters.items():
        table.add_row(part, f"{count:,}", f"{100.0 * count / total:.1f} %")
    return table


def _history(validations: list[dict[str, Any]]) -> Table | str:
    """The validations as a table: all of them, or the best and the latest of many."""
    if not validations:
        return "\nno validation yet"
    shown = validations[-_MOST_ROWS:]
    best = [event for event in validations[:-_MOST_ROWS] if event.get("best")][-1:]
    title = f"\nValidations ({len(validations)})"
    table = Table(title=title, title_justify="left", box=None, padding=(0, 2))
    metric = next((event["metric"] for event in validations if event.get("metric")), "score")
    for name in ("update", "minutes", "loss", "perplexity", metric, ""):
        table.add_column(name, justify="right" if name else "left")
    latest_best = next((event for event in reversed(validations) if event.get("best")), None)
    for event in [*best, *shown]:
        score = event.get("score")
        table.add_row(
            f"{event['step']:,}",
            f"{event['minutes']:.1f}",
            short(event["loss"], 4),
            short(event["perplexity"]),
            "" if score is None else f"{score:.2f}",
            _standing(event, latest_best),
        )
    return table


def _standing(event: dict[str, Any], best: dict[str, Any] | None) -> str:
    """What a row of the history is: the model that the run keeps, or a mean of several."""
    mean = f"mean of {len(event['updates'])} models" if event["event"] == "average" else ""
    return ", ".join(filter(None, ("best" if event is best else "", mean)))
