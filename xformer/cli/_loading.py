"""Loading the pipeline of a command."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

from xformer.cli._console import percent_progress
from xformer.families.checkpoint import is_public
from xformer.families.run_directory import RunDirectory
from xformer.pipelines import Pipeline
from xformer.runs.backend import open_backend

Loaded = TypeVar("Loaded", bound=Pipeline)


def load_pipeline(
    pipeline_type: type[Loaded], directory: Path, backend: str, *, show_progress: bool = True, **options: Any
) -> Loaded:
    """Load a public checkpoint, or a run with a backend that is prepared for the data type of its model."""
    loader: Any = pipeline_type  # mypy takes the bound for its class
    recipe = {} if is_public(directory) else RunDirectory(directory).read_config().get("recipe", {})
    xp = open_backend(backend, recipe.get("training", {}).get("dtype"))
    with percent_progress("loading", visible=show_progress) as progress:
        return loader.from_pretrained(directory, xp=xp, progress=progress, **options)
