"""What the user of `train` asked for, and the two ways to meet it: a new run, or going on with one."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xformer.cli.backend import open_backend
from xformer.cli.console import make_console
from xformer.cli.training import Prepared, say_end, train_run
from xformer.errors import CheckpointError, ConfigError, DataError
from xformer.files import write_json
from xformer.models import TransformerConfig
from xformer.pipelines import Tokenizers
from xformer.text import read_parallel
from xformer.training import Recipe, RunDirectory
from xformer.training.recipe import read_tables
from xformer.training.run_directory import sha256

DEFAULT_MINUTES = 30.0
_LIMITS = ("max_minutes", "max_updates")
_DEFAULTS = {field.name: field.default for field in dataclasses.fields(TransformerConfig)}


@dataclass(frozen=True)
class Request:
    """The options of `train`; None and absent mean that the option was not given.

    files: "source", "target", "valid_source", "valid_target"; changes: settings that win over the recipe's: the task,
    and tables.
    """

    out: Path
    files: dict[str, Path | None]
    recipe: Path | None
    changes: dict[str, Any]
    backend: str | None

    def tables(self) -> dict[str, Any]:
        """The recipe's tables with the changes."""
        tables = read_tables(self.recipe) if self.recipe else {}
        for name, changes in self.changes.items():
            if not isinstance(changes, dict):
                tables |= {name: changes} if changes is not None else {}
                continue
            given = {key: value for key, value in changes.items() if value is not None}
            table = tables.get(name, {})
            if given and isinstance(table, dict):
                tables[name] = table | given
        return tables

    @property
    def where(self) -> str:
        """What errors call the recipe."""
        return str(self.recipe) if self.recipe else "the options"


def start(request: Request) -> int:
    """Check everything, claim the directory, and train; returns the exit code."""
    run = RunDirectory(request.out)
    run.check_is_free()
    files = _all_files(request)
    recipe = Recipe.from_dict(request.tables(), request.where)
    if recipe.training.max_minutes is None and recipe.training.max_updates is None:
        recipe = recipe.with_training(max_minutes=DEFAULT_MINUTES)
    backend = request.backend or "numpy"
    prepared = _prepare(recipe, backend, files)
    data = {name: {"path": os.path.abspath(path), "sha256": _digest(path)} for name, path in files.items()}
    run.start(prepared.config("train", data), prepared.tokenizers.by_side())
    return _train(prepared, run, resume=False)


def go_on(request: Request) -> int:
    """Check that nothing but the end of the run has changed, and train on; returns the exit code."""
    run = RunDirectory(request.out)
    config = run.read_config()
    recipe, backend, data = _parts(run, config)
    tables = request.tables()
    _check_tables(tables, recipe, request.where)
    limits = {name: tables.get("training", {}).pop(name, None) for name in _LIMITS}
    _refuse_changes(tables, recipe, request.where)
    if request.backend not in (None, backend):
        raise ConfigError(
            f"--backend is {request.backend}; the run in {run.path} computes with {backend}; leave it out"
        )
    recipe = Recipe.from_dict(recipe.with_training(**limits).to_dict(), str(run.config))
    files = {name: request.files.get(name) or Path(entry["path"]) for name, entry in data.items()}
    for name, path in files.items():
        if _digest(path) != data[name]["sha256"]:
            raise DataError(
                f"{path} is not the text that the run began with (its SHA-256 differs); restore it, or start a new run"
            )
    prepared = _prepare(recipe, backend, files, Tokenizers.load(run))
    if recipe.to_dict() != config["recipe"]:
        write_json(run.config, {**config, "recipe": recipe.to_dict()})
    return _train(prepared, run, resume=True)


def _train(prepared: Prepared, run: RunDirectory, *, resume: bool) -> int:
    console = make_console()
    prepared.describe(console)
    outcome = train_run(prepared, run, console, resume=resume)
    say_end(prepared.recipe.task, outcome, run, console)
    return outcome.code


def _prepare(recipe: Recipe, backend: str, files: dict[str, Path], tokenizers: Tokenizers | None = None) -> Prepared:
    xp = open_backend(backend, recipe.training.dtype)
    train = read_parallel(files["source"], files["target"])
    valid = read_parallel(files["valid_source"], files["valid_target"])
    names = [files[name] for name in ("source", "target", "valid_source", "valid_target")]
    return Prepared.make(recipe, train, valid, xp=xp, backend=backend, names=names, tokenizers=tokenizers)


def _all_files(request: Request) -> dict[str, Path]:
    missing = [f"--{name.replace('_', '-')}" for name, path in request.files.items() if path is None]
    if missing:
        raise ConfigError(
            f"{', '.join(missing)} not given; a new run needs all four files of text (or --resume, to go on with one)"
        )
    return {name: path for name, path in request.files.items() if path is not None}


def _digest(path: Path) -> str:
    """The SHA-256 of a file of text; it has to be a file that can be read again, for --resume."""
    if path.exists() and not path.is_file():
        raise DataError(
            f"{path} is not a regular file; training reads its text more than once; save it to a file first"
        )
    try:
        return sha256(path)
    except CheckpointError as error:
        raise DataError(str(error)) from error


def _parts(run: RunDirectory, config: dict[str, Any]) -> tuple[Recipe, str, dict[str, Any]]:
    """What a run was told: recipe, backend, and files of text."""
    if config.get("kind") != "train":
        raise ConfigError(f"{run.path} holds a demo, not a run of train; start a new run with another --out")
    try:
        data = {name: {key: entry[key] for key in ("path", "sha256")} for name, entry in config["data"].items()}
        if set(data) != {"source", "target", "valid_source", "valid_target"}:
            raise KeyError("data")
        return Recipe.from_dict(config["recipe"], str(run.config)), str(config["backend"]), data
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{run.config} is not a whole run configuration ({error!r}); restore it") from error


def _check_tables(tables: dict[str, Any], recipe: Recipe, where: str) -> None:
    """Raise ConfigError for tables that make no recipe; what they leave out is as the run began."""
    stored = recipe.to_dict()
    kinds = {name: isinstance(table, dict) for name, table in tables.items()}
    Recipe.from_dict(
        {name: {**stored.get(name, {}), **table} if kinds[name] else table for name, table in tables.items()}, where
    )


def _refuse_changes(tables: dict[str, Any], recipe: Recipe, where: str) -> None:
    """Raise ConfigError when a setting that was given differs from what the run began with."""
    stored = recipe.to_dict()
    if tables.pop("task", recipe.task) != recipe.task:
        raise ConfigError(f"the run began with task {recipe.task!r}, and {where} says another; leave it out")
    for table, values in tables.items():
        for key, value in values.items():
            if key == "shards" and value == 0:
                continue  # "one for each core" was resolved when the run began
            if stored[table].get(key, _DEFAULTS.get(key)) != value:
                raise ConfigError(
                    f"{key} is {value!r} in {where}; the run began with {stored[table].get(key)!r}, and only "
                    "--max-minutes and --max-updates may change; leave it out, or start a new run"
                )
