r"""`xformer resume`: continue a training run.

Continue a training run that was stopped or interrupted, or train a finished one longer.

Recipe and data files are read from the run; the data must not have changed, but may be in another directory (--data).
A resumed run matches an uninterrupted one exactly, on the same backend and machine. A schedule that ends with the time
keeps its limits.

\b
Continue           xformer resume run
Train longer       xformer resume run --max-minutes 60
The data has moved xformer resume run --data corpora
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from xformer.cli._options import BACKEND_HELP, COMPUTING, argument, config_options, value_option
from xformer.cli.train import finish
from xformer.runs import launch
from xformer.runs.config import BaseTrainingConfig


@config_options(BaseTrainingConfig, names=["max_minutes", "max_steps"], default_of="the run's")
def resume(
    directory: Annotated[Path, argument("RUN", "Directory of the run.")],
    settings: dict[str, Any],
    moved_to: Annotated[
        Path | None, typer.Option("--data", metavar="DIR", help="Directory of the data files, if they were moved.")
    ] = None,
    backend: Annotated[
        str | None, value_option("--backend", "NAME", f"{BACKEND_HELP} \\[default: the run's]", COMPUTING)
    ] = None,
    *,
    resuming: dict[str, Any],
) -> int:
    """Continue a training run."""
    options = {"loggers": resuming["logger"] or None, "distributed": resuming["distributed"]}
    return finish(launch.resume(directory, data=moved_to, xp=backend, **options, **settings))
