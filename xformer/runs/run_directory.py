"""The files of a training run, and what may be done to them."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from xformer.errors import CheckpointError, ConfigError
from xformer.io import (
    atomic_write,
    load_arrays,
    read_json,
    restore_like,
    save_arrays,
    unwritable_parent,
    verify_checkpoint,
    write_json,
)
from xformer.text import Tokenizer
from xformer.tree import flatten

# By task: the command that uses its models.
_COMMANDS = {"translation": "translate", "summarization": "summarize", "language_modeling": "generate"}


class RunDirectory:
    """config.json (what the run was told), tokenizers, model.safetensors (the best model), last.safetensors (the
    state to resume from), log.jsonl (one JSON object a line), and, where the settings say so, checkpoints/ (models on
    the way) and averaged.safetensors (their mean)."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.config = self.path / "config.json"
        self.model = self.path / "model.safetensors"
        self.last = self.path / "last.safetensors"
        self.log = self.path / "log.jsonl"
        self.checkpoints = self.path / "checkpoints"
        self.averaged = self.path / "averaged.safetensors"
        self._backup = self.checkpoints / "best.safetensors"

    def tokenizer(self, side: str) -> Path:
        """Where the tokenizer of a side ("source", "target" or "joint") is kept."""
        return self.path / ("tokenizer.json" if side == "joint" else f"{side}_tokenizer.json")

    def files(self) -> list[Path]:
        """What a run keeps, where it is there or not: no output may take its place."""
        tokenizers = [self.tokenizer(side) for side in ("joint", "source", "target")]
        models = [self.model, self.last, self.averaged, *self.checkpoints.glob("*.safetensors")]
        return [self.config, self.log, *tokenizers, *models]

    def start(self, config: dict[str, Any], tokenizers: Mapping[str, Tokenizer]) -> None:
        """Claim the directory for a new run: write its tokenizers, by side, and then its configuration.

        The configuration gets an entry "tokenizers" with the SHA-256 of each file.

        Raises ConfigError when the directory holds anything already; CheckpointError when it cannot be written, and
        then nothing is left in it.
        """
        self.check_is_free()
        fresh = not self.path.exists()
        try:
            for side, tokenizer in tokenizers.items():
                tokenizer.save(self.tokenizer(side))
            digests = {self.tokenizer(side).name: sha256(self.tokenizer(side)) for side in tokenizers}
            # Last: a directory with a configuration is a whole run.
            write_json(self.config, {**config, "tokenizers": digests})
        except CheckpointError:
            with contextlib.suppress(OSError):
                for side in tokenizers:
                    self.tokenizer(side).unlink(missing_ok=True)
                if fresh:
                    self.path.rmdir()
            raise

    def check_is_free(self) -> None:
        """Raise ConfigError when the directory holds a run, or anything else that could be overwritten.

        Raises CheckpointError when it cannot be made.
        """
        if not self.path.exists():
            parent = unwritable_parent(self.path)
            if parent is not None:
                raise CheckpointError(f"cannot make {self.path}: {parent} is not a directory that may be written to")
        elif not self.path.is_dir():
            raise ConfigError(f"{self.path} is a file; expected a directory for the run; choose a new --out")
        elif self.config.exists() and not (self.last.exists() or self.model.exists()):
            raise ConfigError(
                f"{self.path} holds a run that ended before anything was saved; remove it to begin anew, pass --resume "
                "to go on with the same settings, or choose a new --out"
            )
        elif self.config.exists():
            raise ConfigError(f"{self.path} holds another run; pass --resume to go on with it, or choose a new --out")
        elif any(self.path.iterdir()):
            raise ConfigError(f"{self.path} is not empty and holds no run; choose a new --out")

    def load_tokenizer(self, side: str) -> Tokenizer:
        """Read the tokenizer of a side; raises CheckpointError when it is not the one that the run began with."""
        path = self.tokenizer(side)
        tokenizer = Tokenizer.load(path)
        digests = self.read_config().get("tokenizers", {})
        if digests.get(path.name) != sha256(path):
            raise CheckpointError(f"{path} is not the tokenizer that this run began with; restore it or train again")
        return tokenizer

    def read_config(self) -> dict[str, Any]:
        """What the run was told; raises CheckpointError when the directory holds no run."""
        if not self.config.exists():
            raise CheckpointError(f"{self.path} holds no run (no config.json); expected a directory that train made")
        config = read_json(self.config, "run configuration")
        for key in ("recipe", "model", "data", "counts", "tokenizers"):
            if not isinstance(config.get(key, {}), dict):
                raise CheckpointError(f"{self.config} is damaged: {key!r} is not a table; restore it")
        for key in ("model", "tokenizer", "training"):
            if not isinstance(config.get("recipe", {}).get(key, {}), dict):
                raise CheckpointError(f"{self.config} is damaged: {key!r} of its recipe is not a table; restore it")
        return config

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Keep the directory for one training; raises CheckpointError when another one is at work in it."""
        try:
            import fcntl
        except ImportError:  # not on this system
            yield
            return
        handle = os.open(self.path, os.O_RDONLY)
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise CheckpointError(
                    f"another training is at work in {self.path}; stop it first, or choose a new --out"
                ) from None
            except OSError:  # some network file systems have no locks
                pass
            yield
        finally:
            os.close(handle)

    def read_config_for(self, task: str) -> dict[str, Any]:
        """What a run was told that has a model for a task.

        Raises ConfigError for a run of another task, CheckpointError when there is no run, or no model yet.
        """
        config = self.read_config()
        found = config.get("task", "translation")
        if found != task:
            raise ConfigError(
                f"{self.path} holds a model for {found}; expected one for {task}; "
                f"use: xformer {_COMMANDS.get(found, 'inspect')}"
            )
        if not self.model.exists():
            command = config.get("kind", "train")
            raise CheckpointError(
                f"{self.path} has no model yet; go on with: xformer {command} --out {self.path} --resume"
            )
        return config

    def check_resumable(self) -> None:
        """Raise CheckpointError for a model without a state, which a new start would overwrite, or a damaged one."""
        if self.model.exists() and not self.last.exists():
            raise CheckpointError(
                f"{self.last} is missing, but {self.path} has a trained model; restore it to go on, or start a new run"
            )
        for model in filter(Path.exists, (self.model, self._backup)):
            verify_checkpoint(model, without="the next validation makes a new one")

    def save_state(self, model: Any, state: Any, progress: dict[str, Any]) -> None:
        """Write model, optimizer state and progress to one file, atomically.

        state: a NamedTuple of the step and of trees (or None).
        """
        arrays = dict(model.named_parameters())
        for name, tree in _trees(state).items():
            arrays |= {f"{name}:{key}": leaf for key, leaf in tree.named_parameters()}
        metadata = {"format": "xformer-training-state", "progress": json.dumps(progress), "updates": str(state.step)}
        save_arrays(self.last, arrays, metadata)

    def load_state(self, model: Any, state: Any) -> tuple[Any, Any, dict[str, Any]]:
        """Read what `save_state` wrote into trees like `model` and `state`; raises CheckpointError."""
        arrays, metadata = load_arrays(self.last)
        try:
            if metadata["format"] != "xformer-training-state":
                raise KeyError("format")
            progress = json.loads(metadata["progress"])
            trees = {name: _restore(tree, arrays, f"{name}:") for name, tree in _trees(state).items()}
            step = int(metadata.get("updates", progress["step"]))  # fewer, where some were skipped
            return _restore(model, arrays, ""), state._replace(step=step, **trees), progress
        except (KeyError, ValueError, TypeError) as error:
            raise CheckpointError(f"{self.last} is not the training state of this run ({error})") from error

    def replace_best(self, model: Any) -> None:
        """Make a model the best one; what was the best is put aside, for `restore_best`."""
        if self.model.exists() and not self._backup.exists():
            with atomic_write(self._backup) as file:
                file.write(self.model.read_bytes())
        model.save(self.model)

    def restore_best(self) -> bool:
        """Undo `replace_best`; returns whether there was anything to undo."""
        if not self._backup.exists():
            return False
        try:
            os.replace(self._backup, self.model)
        except OSError as error:
            raise CheckpointError(f"cannot write {self.model}: {error.strerror or error}") from error
        return True

    def append_log(self, event: dict[str, Any]) -> None:
        """Add one line to the log."""
        try:
            with self.log.open("a", encoding="utf-8") as file:
                file.write(json.dumps(event) + "\n")
        except OSError as error:
            raise CheckpointError(f"cannot write {self.log}: {error.strerror or error}") from error

    def read_log(self) -> list[dict[str, Any]]:
        """All events of the log; a line that a crash cut off is left out."""
        events = []
        if self.log.exists():
            for line in self.log.read_text(encoding="utf-8", errors="replace").split("\n"):
                try:
                    event = json.loads(line)
                except ValueError:
                    continue
                if isinstance(event, dict):
                    events.append(event)
        return events

    def rewind_log(self, step: int) -> None:
        """Drop events after `step`: a resumed run logs those updates again."""
        kept = [event for event in self.read_log() if event.get("step", 0) <= step]
        with atomic_write(self.log) as file:
            file.write("".join(json.dumps(event) + "\n" for event in kept).encode())


def sha256(path: str | os.PathLike[str]) -> str:
    """The SHA-256 of a file's content, as sha256sum prints it; raises CheckpointError when it cannot be read."""
    try:
        with Path(path).open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from error


def _trees(state: Any) -> dict[str, Any]:
    """The trees of an optimizer's state, by name."""
    return {name: tree for name, tree in state._asdict().items() if name != "step" and tree is not None}


def _restore(tree: Any, arrays: Mapping[str, Any], prefix: str) -> Any:
    """A tree like this one, with the arrays of these names; raises KeyError or ValueError when they do not fit."""
    named = dict(tree.named_parameters())
    wanted = {name: arrays[prefix + name] for name in named}
    for name, array in wanted.items():
        if tuple(array.shape) != tuple(named[name].shape):
            raise ValueError(f"{prefix}{name} has shape {array.shape}")
    placed = restore_like(wanted, named)
    return flatten(tree)[1]([placed[name] for name in named])
