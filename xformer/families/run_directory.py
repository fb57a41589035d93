"""The files of a training run. Inference reads them without importing training."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from xformer.errors import CheckpointError, ConfigError
from xformer.families.checkpoint import describe_missing, write_configs
from xformer.families.gguf_file import find_gguf
from xformer.io import StrPath, file_errors, lock_directory, read_json, unwritable_parent, write_bytes, write_json
from xformer.tokenizers import BaseTokenizer, Tokenizer, load_tokenizer

# The command that uses the model, by task; here, as inference does not import the table of tasks.
COMMANDS = {"translation": "translate", "summarization": "summarize"}
COMMANDS |= {"language_modeling": "generate", "chat": "generate", "classification": "classify"}

FORMAT = 2  # of config.json


class RunDirectory:
    """The directory of a training run.

    Attributes:
        path: The directory.
        config: config.json, the configuration of the run.
        model: model.safetensors, the best model.
        last: last.safetensors, the training state to resume from.
        log: log.jsonl, one JSON object per line.
        checkpoints: checkpoints/, models kept during training, if the configuration asks for them.
        averaged: averaged.safetensors, the average of these models.
        adapters: adapters.safetensors, the adapters (LoRA) that are merged into the best model, if it has any.
        pretrained: pretrained/, configuration and tokenizer of the public checkpoint that the run started from, if any.
    """

    def __init__(self, path: StrPath) -> None:
        self.path = Path(path)
        self.config = self.path / "config.json"
        self.model = self.path / "model.safetensors"
        self.last = self.path / "last.safetensors"
        self.log = self.path / "log.jsonl"
        self.checkpoints = self.path / "checkpoints"
        self.averaged = self.path / "averaged.safetensors"
        self.adapters = self.path / "adapters.safetensors"
        self.pretrained = self.path / "pretrained"
        self._backup = self.checkpoints / "best.safetensors"

    def tokenizer(self, side: str) -> Path:
        """Return the path of the tokenizer of a side ("source", "target" or "joint")."""
        return self.path / ("tokenizer.json" if side == "joint" else f"{side}_tokenizer.json")

    def files(self) -> list[Path]:
        """Return the paths of all files of a run, existing or not, which no output may replace."""
        tokenizers = [self.tokenizer(side) for side in ("joint", "source", "target")]
        models = [self.model, self.last, self.averaged, self.adapters, *self.checkpoints.glob("*.safetensors")]
        return [self.config, self.log, *tokenizers, *models]

    def start(self, config: dict[str, Any], tokenizers: Mapping[str, BaseTokenizer]) -> None:
        """Create the directory of a new run: write its tokenizers and then its configuration.

        Args:
            config: The configuration, JSON-serializable. An entry "tokenizers" with the SHA-256 of each file is added.
            tokenizers: Tokenizers by side. Those of a public checkpoint are copied with its configuration.

        Raises:
            ConfigError: If the directory is not empty.
            CheckpointError: If it cannot be written.
        """
        self.check_is_free()
        for side, tokenizer in tokenizers.items():
            if tokenizer.directory is not None:
                copy_pretrained(tokenizer.directory, self.pretrained)
            else:
                tokenizer.save(self.tokenizer(side))
        files = [*map(self.tokenizer, ("joint", "source", "target")), *self.pretrained.rglob("*")]
        digests = {path.relative_to(self.path).as_posix(): sha256(path) for path in sorted(files) if path.is_file()}
        # Last: a directory with a configuration is a complete run.
        write_json(self.config, {"format": FORMAT, **config, "tokenizers": digests})

    def check_is_free(self) -> None:
        """Check that a new run can be started in the directory.

        Raises:
            ConfigError: If it holds a run, or anything else.
            CheckpointError: If it cannot be created.
        """
        path = self.path
        if not path.exists():
            if (parent := unwritable_parent(path)) is not None:
                raise CheckpointError(f"cannot create {path}: {parent} is not a writable directory")
        elif not path.is_dir():
            raise ConfigError(f"{path} is a file; expected a new or empty directory; choose another --out")
        elif self.config.exists():
            raise ConfigError(f"{path} holds a run; continue it with: xformer resume {path}, or choose another --out")
        elif any(not each.name.startswith(".") for each in path.iterdir()):
            raise ConfigError(f"{path} is not empty and holds no run; choose another --out")

    def load_tokenizer(self, side: str) -> Tokenizer:
        """Read the tokenizer of a side; raise CheckpointError if it is not the one that the run started with."""
        path = self.tokenizer(side)
        tokenizer = Tokenizer.load(path)
        if self.read_config().get("tokenizers", {}).get(path.name) != sha256(path):
            raise CheckpointError(f"{path} is not the tokenizer that this run started with; restore it or train again")
        return tokenizer

    def pretrained_files(self) -> Path | None:
        """Return the directory with the files of the public checkpoint that the run started from; None without one.

        Raises:
            CheckpointError: If a file is not the one that the run started with.
        """
        digests = self.read_config().get("tokenizers", {})
        names = [name for name in digests if name.startswith(f"{self.pretrained.name}/")]
        for name in names:
            if sha256(self.path / name) != digests[name]:
                raise CheckpointError(f"{self.path / name} is not the file that this run started with; restore it")
        return self.pretrained if names else None

    def read_config(self) -> dict[str, Any]:
        """Return the configuration; raise CheckpointError if the directory holds no run or it is damaged."""
        if find_gguf(self.path) is not None:
            raise CheckpointError(f"{self.path} is a GGUF file; expected the directory of a run")
        if not self.config.exists():
            raise CheckpointError(describe_missing(self.path))
        config = read_json(self.config, "run configuration")
        if "model_type" in config or config.get("format") == "onnx":
            kind = "checkpoint in the Hugging Face" if "model_type" in config else "model in the ONNX"
            raise CheckpointError(f"{self.path} is a {kind} format; expected the directory of a run")
        if "xformer" in config and config.get("format") != FORMAT:
            is_old = config.get("format", 0) in range(FORMAT)
            hint = ", or convert the run as docs/how-to/upgrade.md says" if is_old else ""
            received = f"{self.path} is a run of xformer {config['xformer']}, which this version cannot read"
            raise CheckpointError(f"{received}; use that version{hint}")
        if config.get("format") != FORMAT:
            raise CheckpointError(
                f"{self.config} has neither model_type (a checkpoint in the Hugging Face format) nor format {FORMAT} "
                "(a run of this version of xformer); expected one of them"
            )
        recipe = config.get("recipe", {})
        for key in ("recipe", "tokenizers", "model", "tokenizer", "training"):
            is_own = key in ("recipe", "tokenizers")
            if not isinstance((config if is_own else recipe).get(key, {}), dict):
                place = "" if is_own else " of its recipe"
                raise CheckpointError(f"{self.config} is damaged: {key!r}{place} is not a table; restore it")
        task = config.get("task", "translation")
        if task not in COMMANDS:
            raise CheckpointError(f"{self.config} has the task {task!r}; expected one of {', '.join(COMMANDS)}")
        return config

    def lock(self) -> AbstractContextManager[None]:
        """Lock the directory for one training process; raise CheckpointError if another one holds the lock."""
        return lock_directory(self.path)

    def read_config_for(self, task: str) -> dict[str, Any]:
        """Return the configuration of a run that has a model for a task.

        Raises:
            ConfigError: If the run is one of another task.
            CheckpointError: If there is no run, or no model yet.
        """
        config = self.read_config()
        own = config.get("task", "translation")
        if (command := COMMANDS[own]) != COMMANDS.get(task):
            raise ConfigError(f"{self.path} holds a model for {own}; expected one for {task}; use: xformer {command}")
        if not self.model.exists():
            received = f"{self.path} has no model yet: training writes it at the first validation"
            raise CheckpointError(f"{received}; if training has ended, continue with: xformer resume {self.path}")
        return config

    def check_resumable(self) -> None:
        """Raise CheckpointError for a model without a state, which a new start would overwrite."""
        if self.model.exists() and not self.last.exists():
            received = f"{self.last} is missing, but {self.path} has a trained model"
            raise CheckpointError(f"{received}; restore it, or start a new run")

    @property
    def has_average(self) -> bool:
        """True if the best model is an average of checkpoints."""
        return self._backup.exists()

    def back_up_best(self) -> None:
        """Copy the best model, so that `restore_best` can restore it after model.safetensors was replaced."""
        if self.model.exists() and not self._backup.exists():
            write_bytes(self._backup, self.model.read_bytes())

    def restore_best(self) -> bool:
        """Undo the replacement of the best model; return whether there was a backup."""
        if not self._backup.exists():
            return False
        with file_errors(f"cannot write {self.model}"):
            os.replace(self._backup, self.model)
        return True


def copy_pretrained(source: Path, target: Path) -> None:
    """Copy the files of a public checkpoint, except its weights; those of a GGUF file in the Hugging Face format.

    Raises:
        CheckpointError: If a file cannot be read or written.
        ConfigError: If no family computes the same as a GGUF file.
    """
    load_tokenizer(source).save(target)
    if (gguf := find_gguf(source)) is not None:
        write_configs(gguf, target)
        return
    for name in ("config.json", "generation_config.json"):
        if (source / name).is_file():
            write_bytes(target / name, (source / name).read_bytes())


def sha256(path: StrPath) -> str:
    """Return the SHA-256 of a file's content in hexadecimal; raise CheckpointError if it cannot be read."""
    with file_errors(f"cannot read {path}"), Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
