"""Models that a run keeps on the way, and their average (Vaswani et al., 2017, section 6.1)."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from xformer.backends import to_host
from xformer.errors import CheckpointError, ConfigError, ShapeError
from xformer.io import load_arrays, restore_like, verify_checkpoint
from xformer.tree import Module, replace


class Checkpoints:
    """The files step-<n>.safetensors of a run, and which of them stay: the `keep` most recent, or the best ones.

    Which there are is for the caller to remember, as a list of [update, score], so that it is saved with the rest of
    the run's state: files on disk may be newer than that.
    """

    def __init__(self, directory: Path, keep: int, *, best: bool) -> None:
        self.directory, self.keep, self.best = directory, keep, best

    def path(self, step: int) -> Path:
        """Where the model after this update is."""
        return self.directory / f"step-{step}.safetensors"

    def add(self, kept: Sequence[list[Any]], step: int, score: float | None, model: Any) -> list[list[Any]]:
        """Write a model, if it is among those that stay; returns which do. The other files wait for `prune`."""
        entries = [*(entry for entry in kept if entry[0] != step), [step, score]]
        if self.best:
            entries.sort(key=lambda entry: (entry[1], entry[0]))
        chosen = sorted(entries[-self.keep :])
        if [step, score] in chosen:
            model.save(self.path(step))
        return chosen

    def there(self, kept: Sequence[list[Any]]) -> tuple[list[list[Any]], list[int]]:
        """Which of the list have their file, and the updates of those that have none.

        Raises CheckpointError, before the work that it would spoil, for a file that is damaged.
        """
        found = [entry for entry in kept if self.path(entry[0]).exists()]
        for step, _ in found:
            verify_checkpoint(self.path(step), without="the run goes on without it")
        return found, [entry[0] for entry in kept if entry not in found]

    def prune(self, kept: Sequence[list[Any]]) -> None:
        """Remove the files of all others. Call it once the list of those that stay is saved."""
        names = {self.path(step).name for step, _ in kept}
        for path in self.directory.glob("step-*.safetensors"):
            if path.name not in names:
                with contextlib.suppress(OSError):  # a file too many does no harm
                    path.unlink()


def average_models(models: Sequence[Any], *, like: Any = None) -> Any:
    """Return the arithmetic mean of models, summed in float64.

    models: models, or the files they were saved in; they are read one after the other. like: a model of the same
    structure, whose library, dtype and configuration the result has (default: the first one).

    Raises ConfigError when there is none, or no `like` for files; ShapeError when the parameters differ in name or
    shape; CheckpointError when a file cannot be read.
    """
    if not models:
        raise ConfigError("there are no models to average; expected at least one")
    like = models[0] if like is None else like
    if not isinstance(like, Module):
        raise ConfigError(f"{like} is a file; pass `like`, a model of the same structure, to say what to make of it")
    shapes = {name: tuple(array.shape) for name, array in like.named_parameters()}
    total: dict[str, Any] = {}
    for number, model in enumerate(models, start=1):
        arrays = _arrays_of(model)
        name = f"model {number}" if isinstance(model, Module) else str(model)
        _check_structure({key: tuple(array.shape) for key, array in arrays.items()}, shapes, name)
        for key, array in arrays.items():
            wide = array.astype("float64")
            total[key] = total[key] + wide if key in total else wide
    means = {key: array / len(models) for key, array in total.items()}
    return replace(like, restore_like(means, dict(like.named_parameters())))


def _arrays_of(model: Any) -> dict[str, Any]:
    """The parameters of a model, or of a file, as NumPy arrays."""
    if isinstance(model, Module):
        return {name: to_host(array) for name, array in model.named_parameters()}
    arrays, metadata = load_arrays(model)
    if metadata.get("format") != "xformer":
        raise CheckpointError(f"{os.fspath(model)} is not an xformer model; expected a file that model.save() wrote")
    return arrays


def _check_structure(found: Mapping[str, Any], wanted: Mapping[str, Any], name: str) -> None:
    for key in sorted(found.keys() | wanted.keys()):
        if found.get(key) != wanted.get(key):
            ours, others = (str(shapes.get(key, "absent")) for shapes in (found, wanted))
            raise ShapeError(
                f"{key} of {name} is {ours}; expected {others}; only models of the same structure have a mean"
            )
