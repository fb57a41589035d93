"""`xformer resume`: continue a training run."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from xformer.cli._options import DistributedOption, LoggerOption, OptionalBackendOption, config_options
from xformer.cli._training import (
    TrainingJob,
    check_agreement,
    check_loggers,
    file_digest,
    open_communicator,
    train_and_report,
)
from xformer.cli.train import ParallelTrainingJob
from xformer.cli.train_lm import LanguageModelTrainingJob
from xformer.errors import CheckpointError, ConfigError, DataError
from xformer.families.run_directory import RunDirectory
from xformer.io import write_json
from xformer.runs.config import BaseTrainingConfig
from xformer.runs.initial_model import InitialModel
from xformer.runs.recipe import Recipe
from xformer.training.data_parallel import check_shards

HELP = """Continue a training run that was stopped or interrupted, or train a finished one longer.

Recipe and data files are read from the run; the data must not have changed, but may be in another directory \
(--data). A resumed run has the same bits as an uninterrupted one, on the same backend and machine.

\b
Continue           xformer resume run
Train longer       xformer resume run --max-minutes 60
The data has moved xformer resume run --data corpora
"""
_JOBS: Sequence[type[TrainingJob]] = (ParallelTrainingJob, LanguageModelTrainingJob)


@config_options(BaseTrainingConfig, names=["max_minutes", "max_steps"], default_of="the run's")
def resume(
    directory: Annotated[Path, typer.Argument(metavar="RUN", help="Directory of the run.", show_default=False)],
    settings: dict[str, Any],
    moved_to: Annotated[
        Path | None, typer.Option("--data", metavar="DIR", help="Directory of the data files, if they were moved.")
    ] = None,
    backend: OptionalBackendOption = None,
    logger: LoggerOption = None,
    distributed: DistributedOption = None,
) -> int:
    """Continue a training run."""
    run = RunDirectory(directory)
    run.read_config()
    with open_communicator(distributed) as ranks, run.lock() if ranks.rank == 0 else contextlib.nullcontext():
        config = run.read_config()
        run.check_resumable()
        job_type, recipe, data = _read(run, config)
        loggers = logger or config.get("loggers", [])
        check_loggers(loggers)
        recipe = Recipe.from_dict(recipe.with_training(**settings).to_dict(), str(run.config))
        if moved_to is not None:
            names = [path.name for path, _ in data.values()]
            if len({*names}) < len(names):
                raise ConfigError(f"--data: two files are called {max(names, key=names.count)}; expected other names")
            data = {name: (moved_to.absolute() / path.name, digest) for name, (path, digest) in data.items()}
        for path, digest in data.values():
            if not path.exists():
                raise DataError(f"{path} does not exist; if the data was moved, add --data DIR, else restore it")
            if file_digest(path) != digest:
                raise DataError(f"{path} has changed since the run started (its SHA-256 differs); restore it")
        init = recipe.init.path
        if init is not None and InitialModel(Path(init)).digests() != config.get("init"):
            raise CheckpointError(f"{init} has changed since the run started (a SHA-256 differs); restore it")
        backend = backend or config["backend"]
        job = job_type.prepare(recipe, backend, {name: path for name, (path, _) in data.items()}, run)
        resumed = {**config, "recipe": recipe.to_dict(), "backend": backend, "loggers": list(loggers)}
        resumed["data"] = {name: {"path": str(path), "sha256": digest} for name, (path, digest) in data.items()}
        check_shards(recipe.training.data_parallel or 1, ranks)
        check_agreement(ranks, resumed)
        if ranks.rank > 0:
            return train_and_report(job, run, resume=True, communicator=ranks)
        if resumed != config:
            write_json(run.config, resumed)
        return train_and_report(job, run, resume=True, loggers=loggers, communicator=ranks)


def _read(run: RunDirectory, config: dict[str, Any]) -> tuple[type[TrainingJob], Recipe, dict[str, tuple[Path, str]]]:
    """Return the job of a run, its recipe, and path and SHA-256 of its data files."""
    if "demo" in config.get("data", {}):
        raise ConfigError(f"{run.path} contains a demo, which cannot be resumed; run the demo again")
    try:
        job_type = {task: job for job in _JOBS for task in job.tasks}[config["task"]]
        data = {name: (Path(entry["path"]), str(entry["sha256"])) for name, entry in config["data"].items()}
        return job_type, Recipe.from_dict(config["recipe"], str(run.config)), data
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{run.config} is incomplete ({error!r}); restore it") from error
