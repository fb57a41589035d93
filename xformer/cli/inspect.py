r"""`xformer inspect`: show a training run, a public checkpoint, a GGUF file, or the machine and its libraries.

Show a training run, a public checkpoint or a GGUF file, without reading its weights: the model and its
size, the tokenizer, the generation settings, and the settings of model and training that differ from the defaults;
or, with --environment, the machine, the installed libraries and whether the native library is used.

\b
A run           xformer inspect run
Its curves      xformer inspect run --plot curves.png
A checkpoint    xformer inspect all-MiniLM-L6-v2
A GGUF file     xformer inspect model.gguf
Every tensor    xformer inspect run --tensors
For a program   xformer inspect run --json
This machine    xformer inspect --environment
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import itertools
import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from rich.table import Table

from xformer.benchmarks.machine import describe_machine
from xformer.cli import _plots
from xformer.cli._options import argument, flag, value_option
from xformer.errors import CheckpointError, ConfigError, abbreviate
from xformer.families.checkpoint import is_public, open_checkpoint
from xformer.families.gguf_file import GGUFFile
from xformer.families.run_directory import RunDirectory
from xformer.families.tensor_files import DTYPE_NAMES, TensorEntry, read_header
from xformer.generation.pretrained import read_generation
from xformer.io import read_json, read_log
from xformer.models import Encoder, ImageEncoder, ImageTextEncoder, LanguageModel
from xformer.pipelines import Tokenizers
from xformer.runs.console import format_number, make_console, plural
from xformer.runs.recipe import TASKS
from xformer.tokenizers import BaseTokenizer, PretrainedTokenizer, load_tokenizer

_PLOT_HELP = "Plot loss and score of a run against steps."
_MAX_ROWS = 20  # of the table of validations


def inspect(
    directory: Annotated[Path | None, argument("MODEL", "Directory of a run or checkpoint, or a .gguf file.")] = None,
    tensors: Annotated[bool, flag("--tensors", "Also list every tensor.")] = False,
    as_json: Annotated[bool, flag("--json", "Print one JSON object with all settings.")] = False,
    plot: Annotated[Path | None, value_option("--plot", "FILE.png", _PLOT_HELP, None)] = None,
    environment: Annotated[bool, flag("--environment", "Show the machine and libraries instead of a model.")] = False,
) -> None:
    """Show a run, a checkpoint, or the environment."""
    if environment:
        if directory is not None:
            raise ConfigError(f"inspect got the model {directory} and --environment; pass one of them")
        _show_environment(as_json=as_json)
        return
    if directory is None:
        raise ConfigError("inspect got no model; pass a run, a checkpoint, a .gguf file or --environment")
    public = is_public(directory)
    if plot is not None:
        if public:
            raise ConfigError(f"--plot needs the log of a run; {directory} is a public checkpoint")
        _plots.check_plot(plot, RunDirectory(directory).files())
    report, settings = (_inspect_checkpoint if public else _inspect_run)(directory)
    if plot is not None:
        training = report["config"].get("recipe", {}).get("training", {})
        log = read_log(RunDirectory(directory).log)
        _plots.draw_curves(log, plot, label_smoothing=training.get("label_smoothing", 0.0))
    if as_json:
        print(json.dumps(report if tensors else {key: value for key, value in report.items() if key != "tensors"}))
        return
    console = make_console()
    for table in _tables(report, settings, with_tensors=tensors):
        console.print(table)
    if plot is not None:
        console.print(f"\nthe plot is in {plot}")


def _show_environment(*, as_json: bool) -> None:
    """Print the machine, the libraries, whether the native library is used, and what CuPy finds."""
    report = describe_machine()
    if importlib.util.find_spec("cupy") is not None:
        report |= importlib.import_module("xformer.kernels.cupy.machine").describe()
    if as_json:
        print(json.dumps(report))
        return
    versions = ", ".join(f"{name} {version}" for name, version in report.pop("versions").items())
    names = {"blas": "BLAS library", "gpu": "GPU", "native": "native library"}
    rows = [*report.items(), ("libraries", versions)]
    shown = ((names.get(name, name), str(value)) for name, value in rows if value is not None)
    make_console().print(_table("Environment", shown))


def _inspect_run(directory: Path) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Return a JSON-serializable report, and the settings that differ from the defaults by table."""
    run = RunDirectory(directory)
    config = run.read_config()
    task = config.get("task", "translation")
    entries = read_header(run.model) if run.model.exists() else {}
    pretrained = run.pretrained_files()
    tokenizers = Tokenizers.load(run).by_side() if pretrained is None else {"joint": load_tokenizer(pretrained)}
    spec = TASKS[task]
    recipe = {name: table for name, table in config.get("recipe", {}).items() if isinstance(table, dict)}
    settings = {name: _changed(spec.tables[name], table) for name, table in recipe.items() if name in spec.tables}
    counts = {name: count for name, count in config.get("counts", {}).items() if count}
    report = {
        "directory": str(directory),
        "model_type": f"run of xformer {config.get('xformer')} for {task.replace('_', ' ')}",
        "model": spec.model.__name__.removesuffix("Config"),
        **_describe_tensors(entries),
        "tokenizers": {side: _describe_tokenizer(tokenizer) for side, tokenizer in tokenizers.items()},
        "data": counts,
        "config": config,
        "validations": [event for event in read_log(run.log) if event.get("event") in ("validation", "average")],
    }
    return report, settings


def _inspect_checkpoint(directory: Path) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Return a JSON-serializable report, and the settings that differ from the defaults by table."""
    checkpoint = open_checkpoint(directory)
    config, files = checkpoint.model.config, checkpoint.tensors
    is_gguf = isinstance(files, GGUFFile)
    values = files.config if isinstance(files, GGUFFile) else read_json(checkpoint.config_path, "configuration")
    report: dict[str, Any] = {
        "directory": str(directory),
        "model_type": f"{values['model_type']}{' (GGUF)' if is_gguf else ''}",
        "architectures": values.get("architectures") or [],
        "model": type(checkpoint.model).__name__,
        **_describe_tensors(files),
        "config": config.to_dict(),
        "dropout": {key: value for key, value in values.items() if "drop" in key and value},
    }
    shapes = {name: x.shape for name, x in checkpoint.model.named_parameters()}
    report["parameters"] = _count_parts(shapes)  # counts tied tensors once
    eos_ids: tuple[int, ...] = ()
    try:
        tokenizer = load_tokenizer(directory)
        eos_ids = tokenizer.eos_ids
        report["tokenizers"] = {"": _describe_tokenizer(tokenizer)}
        report["languages"] = sorted(tokenizer.language_ids)
    except CheckpointError as error:  # models of images have no tokenizer
        report["tokenizers"], report["tokenizer_error"] = {}, str(error)
    if not isinstance(checkpoint.model, Encoder | ImageEncoder | ImageTextEncoder):
        encoder_decoder = not isinstance(checkpoint.model, LanguageModel)
        generation = read_generation(directory, encoder_decoder=encoder_decoder)
        ends = eos_ids or generation.eos_ids or (config.eos_id,)
        report["generation"] = dict(generation.options)
        report["generation"]["eos_token_id"] = [index for index in ends if index is not None]
    parts = {"model": config}
    if isinstance(checkpoint.model, ImageTextEncoder):
        parts = {"text": checkpoint.model.text.config, "image": checkpoint.model.image.config}
    return report, {name: _changed(type(part), part.to_dict()) for name, part in parts.items()}


def _describe_tokenizer(tokenizer: BaseTokenizer) -> dict[str, Any]:
    described: dict[str, Any] = {"model": tokenizer.model, "vocab_size": tokenizer.vocab_size}
    if isinstance(tokenizer, PretrainedTokenizer):
        special = tokenizer.special_tokens
        return {**described, "special_tokens": special, "chat_template": bool(tokenizer.chat_templates)}
    return {**described, "lowercase": tokenizer.lowercase}


def _describe_tensors(entries: Mapping[str, TensorEntry]) -> dict[str, Any]:
    """Return the parameters by part, the size of the files, and the dtypes and shapes of the tensors."""
    dtypes = {name: DTYPE_NAMES.get(entry.code, entry.code) for name, entry in entries.items()}
    return {
        "parameters": _count_parts({name: entry.shape for name, entry in entries.items()}),
        "bytes": sum(path.stat().st_size for path in {entry.path for entry in entries.values()}),
        "dtypes": dict(Counter(dtypes.values()).most_common()),
        "tensors": {name: {"dtype": dtypes[name], "shape": list(entry.shape)} for name, entry in entries.items()},
    }


def _count_parts(shapes: Mapping[str, Sequence[int]]) -> dict[str, int]:
    """Return the number of parameters by part of the model: encoder, source_embedding, ..."""
    counts: Counter[str] = Counter()
    for name, shape in shapes.items():
        counts[name.split(".")[0]] += math.prod(shape)
    return dict(sorted(counts.items()))


def _changed(config: type[Any], values: dict[str, Any]) -> dict[str, Any]:
    """Return the values that differ from the defaults of a configuration."""
    defaults = {field.name: field.default for field in dataclasses.fields(config)}
    return {name: value for name, value in values.items() if defaults.get(name, dataclasses.MISSING) != value}


def _tables(report: dict[str, Any], tables: dict[str, dict[str, Any]], *, with_tensors: bool) -> Iterator[Table | str]:
    """Yield the tables of a report."""
    yield _table(report["directory"], _summary(report))
    if parameters := report["parameters"]:
        total = max(sum(parameters.values()), 1)
        shares = ((part, f"{count:,}", f"{100.0 * count / total:.1f} %") for part, count in parameters.items())
        yield _table("\nParameters", shares, "<>>")
    changed = (
        ("" if row else f"[{section}]", key, "none" if value is None else abbreviate(str(value), 80))
        for section, values in tables.items()
        for row, (key, value) in enumerate(values.items())
    )
    yield _table("\nSettings that differ from the defaults", changed)
    if validations := report.get("validations"):
        metric = next((event["metric"] for event in validations if event.get("metric")), "score")
        columns = ("step", "minutes", "loss", "perplexity", metric, "")
        yield _table(f"\nValidations ({len(validations)})", _history(validations), ">>>>>", columns)
    elif validations is not None:
        yield "\nno validation yet"
    if with_tensors:
        rows = [(name, x["dtype"], " x ".join(map(str, x["shape"]))) for name, x in report["tensors"].items()]
        yield _table(f"\nTensors ({len(rows)})", rows)


def _table(title: str, rows: Iterable[Sequence[str]], align: str = "", columns: Sequence[str] = ()) -> Table:
    """Return a table with a column on the right for each ">" of `align`, and a header if the columns have names."""
    table = Table(title=title, title_justify="left", show_header=bool(columns), box=None, padding=(0, 2))
    for name, side in itertools.zip_longest(columns, align, fillvalue=""):
        table.add_column(name, justify="right" if side == ">" else "left")
    for row in rows:
        table.add_row(*row)
    return table


def _summary(report: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield what the first table says."""
    architectures = "".join(f", {name}" for name in report.get("architectures", ()))
    yield "model", f"{report['model']}; {report['model_type']}{architectures}"
    dtypes = report["dtypes"]
    counts = (f"{name} ({plural(count, 'tensor')})" if len(dtypes) > 1 else name for name, count in dtypes.items())
    size = f"{sum(report['parameters'].values()):,} in {report['bytes'] / 1e6:,.1f} MB, {', '.join(counts)}"
    yield "parameters", size if report["parameters"] else "no model yet: the run has had no validation"
    for side, tokenizer in report["tokenizers"].items():
        details = [tokenizer["model"], plural(tokenizer["vocab_size"], "token")]
        if "lowercase" in tokenizer:
            details.append("lowercase" if tokenizer["lowercase"] else "cased")
        elif tokenizer["chat_template"]:
            details.append("with a chat template")
        side = "" if report["model"] == "LanguageModel" else side  # it has only one
        yield f"{side} tokenizer".strip(), ", ".join(details)
        if special := tokenizer.get("special_tokens"):
            yield "special tokens", _pairs({role.removesuffix("_token"): token for role, token in special.items()})
    if dropout := report.get("dropout"):
        advice = "for training, use model.with_config(dropout=0.1)"
        yield "dropout", f"0 (the file has {_pairs(dropout)}; {advice})"
    if "tokenizer_error" in report:
        yield "tokenizer", f"none ({report['tokenizer_error']})"
    if report.get("languages"):
        yield "languages", ", ".join(report["languages"])
    for section in ("generation", "data"):
        if report.get(section):
            yield section, _pairs(report[section])


def _pairs(values: Mapping[str, Any]) -> str:
    """Return "name value, name value"; of a list the first five items."""
    texts = []
    for name, value in values.items():
        items = list(value) if isinstance(value, list | tuple) else [value]
        more = f" and {len(items) - 5} more" if len(items) > 5 else ""
        texts.append(f"{name} {' '.join(map(str, items[:5]))}{more}")
    return ", ".join(texts)


def _history(validations: list[dict[str, Any]]) -> Iterator[tuple[str, ...]]:
    """Yield the rows of all validations, or of the best and the latest of many; mark the best model and averages."""
    best = [event for event in validations if event.get("best")]
    earlier = [event for event in best if event in validations[:-_MAX_ROWS]]
    for event in [*earlier[-1:], *validations[-_MAX_ROWS:]]:
        remarks = ["best"] if event in best[-1:] else []
        remarks += [f"average of {len(event['steps'])} checkpoints"] if event["event"] == "average" else []
        yield (
            f"{event['step']:,}",
            f"{event['minutes']:.1f}",
            format_number(event["loss"], 4),
            format_number(event["perplexity"]),
            "" if event.get("score") is None else f"{event['score']:.2f}",
            ", ".join(remarks),
        )
