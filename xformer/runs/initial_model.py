"""The model that a run starts from: a public checkpoint or another run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from xformer.errors import CheckpointError, ConfigError
from xformer.families import load_pretrained
from xformer.families.checkpoint import check_exists, is_public
from xformer.families.gguf_file import find_gguf
from xformer.families.run_directory import RunDirectory, sha256
from xformer.models import BaseModel

# Settings of [model] that do not change the parameters.
MODEL_SETTINGS = frozenset({"dropout", "attention_dropout", "activation_dropout", "rematerialize"})


class InitialModel:
    """The model and tokenizer that a run starts from.

    Args:
        path: Directory of a public checkpoint in the Hugging Face format, a GGUF file, or the directory of a run.

    Attributes:
        path: The path.
        run: The run, or None for a public checkpoint.
        pretrained: Directory or GGUF file with the configuration and the tokenizer of a public checkpoint; None for a
            run with a tokenizer that xformer trained.

    Raises:
        CheckpointError: If the path is none of these.
    """

    def __init__(self, path: Path) -> None:
        check_exists(path)
        self.path = path
        self.run = None if is_public(path) else RunDirectory(path)
        self.pretrained = path if self.run is None else self.run.pretrained_files()

    def check_task(self, task: str) -> None:
        """Raise ConfigError if the directory is a run of another task."""
        if self.run is not None:
            self.run.read_config_for(task)

    def tables(self) -> dict[str, Any]:
        """Return the tables [model] and [tokenizer] of a run; {} for a public or fine-tuned checkpoint."""
        if self.run is None or self.pretrained is not None:
            return {}
        recipe = self.run.read_config()["recipe"]
        return {name: recipe[name] for name in ("model", "tokenizer")}

    def digests(self) -> dict[str, str]:
        """Return the SHA-256 of each file with weights."""
        gguf = None if self.run else find_gguf(self.path)
        files = [self.run.model] if self.run else sorted(self.path.glob("*.safetensors")) if gguf is None else [gguf]
        return {path.name: sha256(path) for path in files}

    def load(self, model_class: type[BaseModel], settings: dict[str, Any], *, xp: Any, dtype: str) -> Any:
        """Load the model.

        Args:
            model_class: Class that the task trains.
            settings: Fields of `MODEL_SETTINGS` that replace those of the model.
            xp: Array library.
            dtype: Dtype of the parameters.

        Raises:
            CheckpointError: If a file is damaged, or the model is of another class.
        """
        model = load_pretrained(self.path, xp=xp, dtype=dtype)
        if type(model) is not model_class:
            raise CheckpointError(
                f"the model of {self.path} is of class {type(model).__name__}; expected {model_class.__name__}"
            )
        changes = {name: value for name, value in settings.items() if name in MODEL_SETTINGS}
        return model.with_config(**changes)


def check_init_settings(tables: dict[str, Any], name: str) -> None:
    """Raise ConfigError for settings that conflict with those of an initial model."""
    for table, allowed in (("model", MODEL_SETTINGS), ("tokenizer", frozenset[str]())):
        values = tables.get(table, {})
        for key in values if isinstance(values, dict) else ():
            if key not in allowed:
                raise ConfigError(
                    f"{key} of [{table}] in {name} cannot be changed with --init, which determines it; omit {key}"
                )
