"""What the user of a training command asked for, and the two ways to meet it: a new run, or going on with one."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xformer.cli.console import make_console, program
from xformer.cli.training import Prepared, command_for, say_end, train_run
from xformer.errors import CheckpointError, ConfigError, DataError
from xformer.io import write_json
from xformer.runs.config import check_setting
from xformer.runs.recipe import TASKS, read_tables
from xformer.runs.run_directory import sha256
from xformer.training import Recipe, RunDirectory

DEFAULT_MINUTES = 30.0
_LIMITS = ("max_minutes", "max_updates")


@dataclass(frozen=True)
class Work:
    """What a command trains.

    command: its name; tasks: those of recipes that it takes, the usual one first; needed, optional: the files of text
    that a new run is given; prepare: makes ready what training needs, of recipe, backend, files, and, to go on with
    one, the run.
    """

    command: str
    tasks: tuple[str, ...]
    needed: tuple[str, ...]
    optional: tuple[str, ...]
    prepare: Callable[[Recipe, str, Mapping[str, Path], RunDirectory | None], Prepared]


@dataclass(frozen=True)
class Request:
    """The options of a training command; None and absent mean that the option was not given.

    files: of text, by the names that the work has for them; changes: settings that win over the recipe's: the task,
    and tables.
    """

    work: Work
    out: Path
    files: dict[str, Path | None]
    recipe: Path | None
    changes: dict[str, Any]
    backend: str | None

    @property
    def options(self) -> dict[str, Any]:
        """The settings that were given as options, by name."""
        tables = [changes if isinstance(changes, dict) else {name: changes} for name, changes in self.changes.items()]
        return {key: value for table in tables for key, value in table.items() if value is not None}

    def asked(self, key: str, value: Any) -> str:
        """Say a setting, and where it comes from."""
        return f"{_option(key)} is {value!r}" if key in self.options else f"{key} is {value!r} in {self.recipe}"

    def tables(self) -> dict[str, Any]:
        """The recipe's tables with the changes; raises ConfigError for an option that is wrong whatever they say."""
        for key, value in self.options.items():
            check_setting(key, value, _option(key))
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

    def check_task(self, task: Any) -> None:
        """Raise ConfigError for a task that the command does not train."""
        if task not in (None, *self.work.tasks):
            other = f"; use: {program()} {command_for(task)}" if task in list(TASKS) else ""
            raise ConfigError(
                f"{self.asked('task', task)}; xformer {self.work.command} is for {' or '.join(self.work.tasks)}{other}"
            )

    def given_files(self) -> dict[str, Path]:
        """The files of text that were named."""
        return {name: path for name, path in self.files.items() if path is not None}

    @property
    def where(self) -> str:
        """What errors call the tables."""
        options = ", ".join(map(_option, self.options))
        return (f"{self.recipe} with {options}" if options else str(self.recipe)) if self.recipe else "the options"


def start(request: Request) -> int:
    """Check everything, claim the directory, and train; returns the exit code."""
    run, work = RunDirectory(request.out), request.work
    run.check_is_free()
    files = _needed_files(request)
    tables = {"task": work.tasks[0], **request.tables()}
    request.check_task(tables["task"])
    recipe = Recipe.from_dict(tables, request.where)
    if recipe.training.max_minutes is None and recipe.training.max_updates is None:
        recipe = recipe.with_training(max_minutes=DEFAULT_MINUTES)
    prepared = work.prepare(recipe, request.backend or "numpy", files, None)
    data = {name: {"path": os.path.abspath(path), "sha256": _digest(path)} for name, path in files.items()}
    run.start(prepared.config(work.command, data), prepared.tokenizers())
    with run.lock():
        return _train(prepared, run, resume=False)


def resume(request: Request) -> int:
    """Check that nothing but the end of the run has changed, and train on; returns the exit code."""
    run = RunDirectory(request.out)
    run.read_config()
    with run.lock():
        return _go_on(request, run)


def _go_on(request: Request, run: RunDirectory) -> int:
    config = run.read_config()
    run.check_resumable()
    recipe, backend, data = _parts(run, config, request.work)
    tables = request.tables()
    request.check_task(tables.get("task"))
    _refuse_changes(request, tables, recipe)
    _check_tables(tables, recipe, request.where)
    limits = {name: tables.get("training", {}).get(name) for name in _LIMITS}
    if request.backend not in (None, backend):
        raise ConfigError(
            f"--backend is {request.backend}; the run in {run.path} computes with {backend}; leave it out"
        )
    recipe = Recipe.from_dict(recipe.with_training(**limits).to_dict(), str(run.config))
    files = {name: Path(entry["path"]) for name, entry in data.items()} | _same_files(request, data)
    for name, path in files.items():
        if _digest(path) != data[name]["sha256"]:
            raise DataError(
                f"{path} is not the text that the run began with (its SHA-256 differs); restore it, or start a new run"
            )
    prepared = request.work.prepare(recipe, backend, files, run)
    if recipe.to_dict() != config["recipe"]:
        write_json(run.config, {**config, "recipe": recipe.to_dict()})
    return _train(prepared, run, resume=True)


def _train(prepared: Prepared, run: RunDirectory, *, resume: bool) -> int:
    console = make_console()
    prepared.describe(console)
    outcome = train_run(prepared, run, console, resume=resume)
    say_end(prepared.recipe.task, outcome, run, console)
    return outcome.code


def _needed_files(request: Request) -> dict[str, Path]:
    files, needed = request.given_files(), request.work.needed
    missing = [_option(name) for name in needed if name not in files]
    if missing:
        counted = f"all {len(needed)} files" if len(needed) > 1 else "a file"
        raise ConfigError(
            f"{', '.join(missing)} not given; a new run needs {counted} of text (or --resume, to go on with one)"
        )
    return files


def _same_files(request: Request, data: dict[str, Any]) -> dict[str, Path]:
    """The files that were named, to go on with a run; raises ConfigError for one that the run began without."""
    files = request.given_files()
    for name in files:
        if name not in data:
            raise ConfigError(f"{_option(name)} is given, and the run began without it; leave it out")
    return files


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


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


def _parts(run: RunDirectory, config: dict[str, Any], work: Work) -> tuple[Recipe, str, dict[str, Any]]:
    """What a run was told: recipe, backend, and files of text."""
    kind = config.get("kind")
    if kind == "demo":
        raise ConfigError(f"{run.path} holds a demo, not a run of {work.command}; start a new run with another --out")
    if kind != work.command:
        raise ConfigError(f"{run.path} holds a run of {kind}; go on with it with: xformer {kind} --resume")
    try:
        data = {name: {key: entry[key] for key in ("path", "sha256")} for name, entry in config["data"].items()}
        if not set(work.needed) <= set(data) <= {*work.needed, *work.optional}:
            raise KeyError("data")
        return Recipe.from_dict(config["recipe"], str(run.config)), str(config["backend"]), data
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{run.config} is not a whole run configuration ({error!r}); restore it") from error


def _check_tables(tables: dict[str, Any], recipe: Recipe, where: str) -> None:
    """Raise ConfigError for tables that make no recipe; what they leave out is as the run began."""
    stored = recipe.to_dict()
    kinds = {name: isinstance(table, dict) for name, table in tables.items()}
    merged = {name: {**stored.get(name, {}), **table} if kinds[name] else table for name, table in tables.items()}
    Recipe.from_dict({"task": recipe.task, **merged}, where)


def _refuse_changes(request: Request, tables: dict[str, Any], recipe: Recipe) -> None:
    """Raise ConfigError when a setting that was given differs from what the run began with."""
    stored, kind = recipe.to_dict(), TASKS[recipe.task]
    defaults = {f.name: f.default for f in dataclasses.fields(kind.model) if f.name not in kind.not_in_recipes}
    stored["model"] = defaults | stored["model"]
    given = [("task", tables.get("task", recipe.task), recipe.task)]
    for name, began_with in stored.items():
        table = tables.get(name)
        if isinstance(table, dict):  # what is no table, and unknown keys, are refused as they are in a new run
            given += [(key, value, began_with[key]) for key, value in table.items() if key in began_with]
    for key, value, began_with in given:
        if key in _LIMITS or value == began_with or (key == "shards" and value == 0):
            continue  # of shards, 0, "one for each core", was resolved when the run began
        raise ConfigError(
            f"{request.asked(key, value)}; the run began with {began_with!r}, and only --max-minutes and --max-updates "
            "may change; leave it out, or start a new run"
        )
