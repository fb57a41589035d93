"""Models kept during training, and their average (Vaswani et al., 2017, section 6.1)."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from xformer.backends import to_host
from xformer.errors import CheckpointError, ConfigError, ShapeError
from xformer.io import load_arrays, restore_like
from xformer.training.checkpoint import save_parameters
from xformer.tree import Module, replace


class Checkpoints:
    """The files step-<n>.safetensors of a run: the most recent models, or the best ones.

    The caller keeps the list of entries [step, score] and saves it with the training state, since files on disk may be
    newer than the state.

    Args:
        directory: Directory of the files.
        max_to_keep: Number of models to keep.
        best: Keep the models with the best scores instead of the most recent ones.
    """

    def __init__(self, directory: Path, max_to_keep: int, *, best: bool) -> None:
        self.directory, self.max_to_keep, self.best = directory, max_to_keep, best

    def path(self, step: int) -> Path:
        """Return the path of the model after this step."""
        return self.directory / f"step-{step}.safetensors"

    def add(self, entries: Sequence[list[Any]], step: int, score: float | None, model: Any) -> list[list[Any]]:
        """Save a model if it belongs to those to keep, and return the new entries; `prune` removes the other files."""
        candidates = [*(entry for entry in entries if entry[0] != step), [step, score]]
        if self.best:
            candidates.sort(key=lambda entry: (entry[1], entry[0]))
        kept = sorted(candidates[-self.max_to_keep :])
        if [step, score] in kept:
            save_parameters(model, self.path(step))
        return kept

    def prune(self, entries: Sequence[list[Any]]) -> None:
        """Remove all other files. Call it once the entries are saved."""
        names = {self.path(step).name for step, _ in entries}
        for path in self.directory.glob("step-*.safetensors"):
            if path.name not in names:
                with contextlib.suppress(OSError):  # an extra file does no harm
                    path.unlink()


def average_models(models: Sequence[Any], *, like: Any = None) -> Any:
    """Return the arithmetic mean of models, summed in float64.

    Args:
        models: Models, or the files they were saved in, which are read one after the other.
        like: A model of the same structure, whose backend, dtype and configuration the result has; default the first
            model.

    Raises:
        ConfigError: If there are no models, or files without `like`.
        ShapeError: If the parameters differ in name or shape.
        CheckpointError: If a file cannot be read.
    """
    if not models:
        raise ConfigError("models is empty; expected at least one model to average")
    like = models[0] if like is None else like
    if not isinstance(like, Module):
        raise ConfigError(f"{like} is a file; pass like=, a model of the same structure")
    shapes = {name: tuple(array.shape) for name, array in like.named_arrays()}
    total: dict[str, Any] = {}
    for number, model in enumerate(models, start=1):
        arrays = _arrays_of(model)
        name = f"model {number}" if isinstance(model, Module) else str(model)
        _check_structure({key: tuple(array.shape) for key, array in arrays.items()}, shapes, name)
        for key, _ in like.named_parameters():
            wide = arrays[key].astype("float64")
            total[key] = total[key] + wide if key in total else wide
    means = {key: array / len(models) for key, array in total.items()}
    current = dict(like.named_arrays())
    return replace(like, current | restore_like(means, {key: current[key] for key in means}))


def _arrays_of(model: Any) -> dict[str, Any]:
    """Return the parameters of a model, or of a file, as NumPy arrays."""
    if isinstance(model, Module):
        return {name: to_host(array) for name, array in model.named_arrays()}
    arrays, metadata = load_arrays(model)
    if metadata.get("format") != "xformer":
        raise CheckpointError(f"{os.fspath(model)} is not an xformer model; expected a file that model.save() wrote")
    return arrays


def _check_structure(shapes: Mapping[str, Any], expected: Mapping[str, Any], name: str) -> None:
    for key in sorted(shapes.keys() | expected.keys()):
        if shapes.get(key) != expected.get(key):
            actual_shape, expected_shape = (str(each.get(key, "absent")) for each in (shapes, expected))
            raise ShapeError(
                f"{key} of {name} is {actual_shape}; expected {expected_shape}; models must have the same structure"
            )
