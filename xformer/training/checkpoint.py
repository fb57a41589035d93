"""The files that `fit` keeps in a directory: the training state to resume from, and a log."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from xformer.errors import CheckpointError, ConfigError, describe_type
from xformer.io import atomic_write, check_path, load_arrays, lock_directory, read_log, restore_like, save_arrays
from xformer.tree import Module, replace


class TrainingFiles:
    """last.safetensors (model, optimizer state, progress) and log.jsonl (one JSON object per line) in a directory."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = Path(directory)
        self.state = self.directory / "last.safetensors"
        self.log = self.directory / "log.jsonl"

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        """Create the directory and lock it for one training run.

        Raises:
            CheckpointError: If it cannot be created or written, or another process trains in it.
        """
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            with self.log.open("a", encoding="utf-8"):
                pass
        except OSError as error:
            raise CheckpointError(f"cannot write to {self.directory}: {error.strerror or error}") from error
        with lock_directory(self.directory):
            yield

    def save_state(self, model: Any, state: Any, progress: dict[str, Any]) -> None:
        """Write the model, the optimizer state and the progress to one file, atomically."""
        arrays = dict(model.named_arrays())
        for name, tree in _trees(state).items():
            arrays |= {f"{name}:{key}": leaf for key, leaf in tree.named_arrays()}
        metadata = {"format": "xformer-training-state", "progress": json.dumps(progress), "step": str(state.step)}
        save_arrays(self.state, arrays, metadata)

    def load_state(self, model: Any, state: Any) -> tuple[Any, Any, dict[str, Any]]:
        """Read what `save_state` wrote into trees like `model` and `state`.

        Raises:
            CheckpointError: If the file is missing, damaged, or the state of another model or optimizer.
        """
        arrays, metadata = load_arrays(self.state)
        try:
            if metadata["format"] != "xformer-training-state":
                raise KeyError("format")
            progress = json.loads(metadata["progress"])
            trees = {name: _restore(tree, arrays, f"{name}:") for name, tree in _trees(state).items()}
            return _restore(model, arrays, ""), state._replace(step=int(metadata["step"]), **trees), progress
        except (KeyError, ValueError, TypeError) as error:
            raise CheckpointError(f"{self.state} is not the training state of this run ({error})") from error

    def append_log(self, *events: dict[str, Any]) -> None:
        """Append lines to the log."""
        try:
            with self.log.open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(event) + "\n" for event in events)
        except OSError as error:
            raise CheckpointError(f"cannot write {self.log}: {error.strerror or error}") from error

    def read_log(self) -> list[dict[str, Any]]:
        """Return all events of the log."""
        return read_log(self.log)

    def rewind_log(self, step: int) -> None:
        """Remove events after `step`, which a resumed run logs again."""
        events = [event for event in self.read_log() if event.get("step", 0) <= step]
        with atomic_write(self.log) as file:
            file.write("".join(json.dumps(event) + "\n" for event in events).encode())


def save_parameters(model: Any, path: str | os.PathLike[str]) -> None:
    """Write a model to a safetensors file: by its own `save`, or the named parameters of any Module.

    Args:
        model: A Module.
        path: The file, replaced atomically.
    """
    _check_module(model)
    if hasattr(model, "save"):
        model.save(path)
    else:
        save_arrays(path, dict(model.named_arrays()), {"format": "xformer", "model": type(model).__name__})


def load_parameters(model: Any, path: str | os.PathLike[str]) -> Any:
    """Return the model with the parameters that `save_parameters` wrote; the model passed in is unchanged.

    Args:
        model: A Module of the same structure; its backend, dtype and device are kept.
        path: The file, or the directory passed to `fit` as `run_dir`.

    Raises:
        CheckpointError: If the file is missing or damaged.
        ConfigError: If the names of the parameters differ.
        ShapeError: If their shapes differ.
    """
    _check_module(model)
    check_path(path)
    path = Path(path, "model.safetensors") if os.path.isdir(path) else path
    return replace(model, restore_like(load_arrays(path)[0], dict(model.named_arrays())))


def _check_module(model: Any) -> None:
    if not isinstance(model, Module):
        raise ConfigError(f"model is {describe_type(model)}; expected a Module as the first argument")


def _trees(state: Any) -> dict[str, Any]:
    """Return the trees of an optimizer's state, by name."""
    return {name: tree for name, tree in state._asdict().items() if name != "step" and tree is not None}


def _restore(tree: Any, arrays: Mapping[str, Any], prefix: str) -> Any:
    """Return the tree with the arrays of these names; raise KeyError or ShapeError if they do not fit."""
    current = dict(tree.named_arrays())
    return replace(tree, restore_like({name: arrays[prefix + name] for name in current}, current))
