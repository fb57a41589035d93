"""`xformer inspect`: show a training run."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from xformer.cli import _plots
from xformer.cli._console import format_number, make_console, plural
from xformer.errors import CheckpointError, ConfigError
from xformer.families.checkpoint import is_public, open_checkpoint
from xformer.families.gguf_file import find_gguf
from xformer.families.gguf_tokenizer import read_tokenizer
from xformer.io import load_arrays
from xformer.pipelines import Tokenizers
from xformer.runs.run_directory import RunDirectory
from xformer.text import load_tokenizer
from xformer.training.checkpoint import TrainingFiles

HELP = """Show a training run: its configuration, the parameters of the model by part, the tokenizers, and the \
validations. Or show a public checkpoint, without reading its weights.

\b
  xformer inspect run
  xformer inspect run --plot curves.png
  xformer inspect run --json
  xformer inspect all-MiniLM-L6-v2
"""
_MAX_ROWS = 20  # of the table of validations


def inspect(
    directory: Annotated[
        Path, typer.Argument(metavar="RUN", help="Directory of a run or checkpoint.", show_default=False)
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE.png", help="Plot loss and score against steps."),
    ] = None,
) -> None:
    """Show a training run."""
    if is_public(directory):
        if plot is not None:
            raise ConfigError(f"--plot needs the log of a run; {directory} is a public checkpoint")
        report = collect_checkpoint(directory)
        if as_json:
            print(json.dumps(report))
        else:
            show_checkpoint(report, make_console())
        return
    if plot is not None:
        _plots.check_plot(plot, RunDirectory(directory).files())
    report = collect(directory)
    if plot is not None:
        training = report["config"].get("recipe", {}).get("training", {})
        _plots.draw_curves(report["log"], plot, label_smoothing=training.get("label_smoothing", 0.0))
    if as_json:
        print(json.dumps({name: value for name, value in report.items() if name != "log"}))
        return
    console = make_console()
    show(report, console)
    if plot is not None:
        console.print(f"\nthe plot is in {plot}")


def collect(directory: Path) -> dict[str, Any]:
    """Return everything about a run, JSON-serializable; raises CheckpointError if a file is missing or damaged."""
    run = RunDirectory(directory)
    config = run.read_config()
    log = TrainingFiles(directory).read_log()
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


def collect_checkpoint(directory: Path) -> dict[str, Any]:
    """Return what the files of a public checkpoint say about it, JSON-serializable; no weights are read."""
    checkpoint = open_checkpoint(directory)
    config = checkpoint.model.config
    return {
        "directory": str(directory),
        "family": checkpoint.family.model_types[0],
        "model": type(checkpoint.model).__name__,
        "dtype": checkpoint.tensors.dtype(),
        "config": config.to_dict(),
        "parameters": _count({name: x.shape for name, x in checkpoint.model.named_parameters()}),
        "tokenizer": _describe_tokenizer(directory),
    }


def _describe_tokenizer(directory: Path) -> dict[str, Any] | None:
    gguf = find_gguf(directory)
    try:
        tokenizer = load_tokenizer(directory) if gguf is None else read_tokenizer(gguf).pretrained(gguf.parent)
    except CheckpointError:
        return None  # the model of an image has none
    return {
        "vocab_size": tokenizer.vocab_size,
        "special_tokens": tokenizer.special_tokens,
        "languages": tokenizer.languages,
        "chat_template": bool(tokenizer.chat_templates),
    }


def show_checkpoint(report: dict[str, Any], console: Console) -> None:
    """Print a report of a public checkpoint as tables."""
    console.print(f"{report['directory']}: {report['model']} of the family {report['family']}, {report['dtype']}\n")
    console.print(_settings_table({"recipe": {"model": report["config"]}}))
    console.print(_parameter_table(report["parameters"]))
    tokenizer = report["tokenizer"]
    if tokenizer is None:
        console.print("no tokenizer that xformer reads")
        return
    special = ", ".join(f"{role} {token}" for role, token in tokenizer["special_tokens"].items())
    chat = "with a chat template" if tokenizer["chat_template"] else "without a chat template"
    console.print(f"tokenizer: {plural(tokenizer['vocab_size'], 'token')}, {chat}", markup=False)
    console.print(f"special tokens: {special or 'none'}", markup=False)
    if tokenizer["languages"]:
        console.print(f"languages: {', '.join(tokenizer['languages'])}", markup=False)


def show(report: dict[str, Any], console: Console) -> None:
    """Print a report as tables."""
    config = report["config"]
    console.print(
        f"{report['directory']}: training of a model for {config.get('task', 'translation')}, "
        f"version {config.get('xformer')}, backend {config.get('backend')}\n"
    )
    console.print(_settings_table(config))
    if report["parameters"]:
        console.print(_parameter_table(report["parameters"]))
    else:
        console.print("no model yet: the run has not been validated")
    for side, tokenizer in report["tokenizers"].items():
        case = "lowercase" if tokenizer["lowercase"] else "cased"
        side = "" if config.get("task") == "language_modeling" else f"{side} "
        console.print(f"{side}tokenizer: {tokenizer['model']}, {plural(tokenizer['vocab_size'], 'token')}, {case}")
    console.print(_history(report["validations"]))


def _parameters(run: RunDirectory) -> dict[str, int]:
    """Return the number of parameters by part of the model: "encoder 0", "source_embedding", ..."""
    if not run.model.exists():
        return {}
    return _count({name: array.shape for name, array in load_arrays(run.model)[0].items()})


def _count(shapes: dict[str, tuple[int, ...]]) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for name, shape in shapes.items():
        first, second, *_ = [*name.split("."), ""]
        counts[f"{first} {second}" if second.isdigit() else first] += math.prod(shape)
    return dict(sorted(counts.items(), key=lambda part: _natural_key(part[0])))


def _natural_key(name: str) -> list[str | int]:
    """Return a key that sorts "encoder 2" before "encoder 10"."""
    return [int(word) if word.isdecimal() else word for word in re.split(r"(\d+)", name)]


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
    """Return the validations as a table: all of them, or the best and the latest of many."""
    if not validations:
        return "\nno validation yet"
    shown = validations[-_MAX_ROWS:]
    best = [event for event in validations[:-_MAX_ROWS] if event.get("best")][-1:]
    title = f"\nValidations ({len(validations)})"
    table = Table(title=title, title_justify="left", box=None, padding=(0, 2))
    metric = next((event["metric"] for event in validations if event.get("metric")), "score")
    for name in ("step", "minutes", "loss", "perplexity", metric, ""):
        table.add_column(name, justify="right" if name else "left")
    latest_best = next((event for event in reversed(validations) if event.get("best")), None)
    for event in [*best, *shown]:
        score = event.get("score")
        table.add_row(
            f"{event['step']:,}",
            f"{event['minutes']:.1f}",
            format_number(event["loss"], 4),
            format_number(event["perplexity"]),
            "" if score is None else f"{score:.2f}",
            _remark(event, latest_best),
        )
    return table


def _remark(event: dict[str, Any], best: dict[str, Any] | None) -> str:
    """Mark the best model, and the average of several."""
    average = f"average of {len(event['steps'])} checkpoints" if event["event"] == "average" else ""
    return ", ".join(filter(None, ("best" if event is best else "", average)))
