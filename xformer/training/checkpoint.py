"""The files that `fit` keeps in a directory: the training state to resume from, and a log."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import zlib
from collections import Counter
from collections.abc import ItemsView, Iterator, Mapping, Sequence
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import numpy as np

from xformer import io
from xformer.backends import array_namespace
from xformer.backends.array_types import T
from xformer.errors import CheckpointError, ConfigError, describe_type
from xformer.io import StrPath
from xformer.layers.weights import has_adapters
from xformer.models.base import BaseModel
from xformer.tree import Module, is_array, replace


class TrainingFiles:
    """last.safetensors (model, optimizer state, progress) and log.jsonl (one JSON object per line) in a directory."""

    def __init__(self, directory: StrPath) -> None:
        self.directory = Path(directory)
        self.state = self.directory / "last.safetensors"
        self.log = self.directory / "log.jsonl"

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        """Create the directory and lock it for one training run.

        Raises:
            CheckpointError: If it cannot be created or written, or another process trains in it.
        """
        with io.file_errors(f"cannot write to {self.directory}"):
            self.directory.mkdir(parents=True, exist_ok=True)
            with self.log.open("a", encoding="utf-8"):
                pass
        with io.lock_directory(self.directory):
            yield

    def check_state(self, model: Any, state: Any) -> None:
        """Raise ConfigError unless `save_state` can write a model and an optimizer state."""
        if name := nonfinite_parameter(model):
            raise ConfigError(f"{name} is not finite, and run_dir keeps finite parameters only; freeze it or change it")
        try:
            arrays = _arrays(model, state)
        except (AttributeError, TypeError, ValueError) as error:
            received = f"the optimizer's state, {describe_type(state)}, cannot be saved in run_dir ({error})"
            expected = "a NamedTuple of `step`, an integer, and of trees like the model"
            raise ConfigError(f"{received}; expected {expected}") from error
        io.check_savable(arrays)

    def save_state(self, model: Any, state: Any, optimizer: str, progress: dict[str, Any]) -> None:
        """Write the model, the optimizer state and the progress to one file, atomically."""
        progress = {"optimizer": optimizer, "settings": settings_of(model), **progress}
        metadata = {"format": "xformer-training-state", "progress": to_json(progress), "step": str(int(state.step))}
        io.save_arrays(self.state, _arrays(model, state), metadata)

    def load_state(self, model: Any, state: Any, optimizer: str) -> tuple[Any, Any, dict[str, Any]]:
        """Read what `save_state` wrote into trees like `model` and `state`.

        Raises:
            CheckpointError: If the file is missing, damaged, or the state of another model or optimizer.
        """
        arrays, metadata = io.load_arrays(self.state)
        try:
            if metadata["format"] != "xformer-training-state":
                raise KeyError("format")
            progress = json.loads(metadata["progress"])
            trees = {name: _restore(tree, arrays, f"{name}:") for name, tree in _trees(state).items()}
            model, state = _restore(model, arrays, ""), state._replace(step=int(metadata["step"]), **trees)
        except (KeyError, ValueError, TypeError) as error:
            raise CheckpointError(f"{self.state} is not the training state of this run ({error})") from error
        if progress.get("optimizer") != optimizer:
            received = f"{self.state} is the state of {progress.get('optimizer')}; expected {optimizer}"
            raise CheckpointError(f"{received}; use the same optimizer, or another directory")
        check_settings(self.state, model, progress.get("settings", {}))
        return model, state, progress

    def save_model(self, model: Any) -> None:
        """Write the model that `fit` returns."""
        save_parameters(model, self.directory / "model.safetensors")

    def append_log(self, *events: dict[str, Any]) -> None:
        """Append lines to the log."""
        with io.file_errors(f"cannot write {self.log}"), self.log.open("a", encoding="utf-8") as file:
            file.writelines(to_json(event) + "\n" for event in events)

    def read_log(self) -> list[dict[str, Any]]:
        """Return all events of the log."""
        return io.read_log(self.log)

    def rewind_log(self, step: int) -> None:
        """Remove events after `step`, which a resumed run logs again."""
        events = [event for event in self.read_log() if event.get("step", 0) <= step]
        with io.atomic_write(self.log) as file:
            file.write("".join(json.dumps(event) + "\n" for event in events).encode())


def save_parameters(model: Any, path: StrPath) -> None:
    """Write a Module to a safetensors file: a `BaseModel` as its `save`, all others as named arrays.

    Args:
        model: A Module.
        path: The file, replaced atomically.
    """
    _check_module(model)
    if isinstance(model, BaseModel) and not has_adapters(model):
        model.save(path)
    else:
        metadata = {"format": "xformer", "model": type(model).__name__, "settings": json.dumps(settings_of(model))}
        io.save_arrays(path, dict(model.named_arrays()), metadata)


def load_parameters(model: T, path: StrPath) -> T:
    """Return the model with the parameters that `save_parameters` wrote; the model passed in is unchanged.

    Args:
        model: A Module of the same structure, and with the same settings if it has adapters; its backend, dtype and
            device are kept.
        path: The file, or the directory passed to `fit` as `run_dir`.

    Raises:
        CheckpointError: If the file is missing or damaged, or holds adapters of a model with other settings.
        ConfigError: If the names of the parameters differ.
        ShapeError: If their shapes differ.
    """
    _check_module(model)
    io.check_path(path)
    path = Path(path, "model.safetensors") if os.path.isdir(path) else path
    arrays, metadata = io.load_arrays(path)
    loaded = replace(model, io.restore_like(arrays, dict(model.named_arrays())))
    if has_adapters(model):  # their scale belongs to their parameters; other settings, such as dropout, may change
        check_settings(path, model, json.loads(metadata.get("settings", "{}")))
    return loaded


def nonfinite_parameter(model: Any) -> str | None:
    """Return the name of a trainable parameter that holds NaN or infinity, or None."""
    for name, array in model.named_trainable_parameters():
        xp = array_namespace(array)
        if not bool(xp.all(xp.isfinite(array))):
            return str(name)
    return None


def states_of(callbacks: Sequence[Any], *, is_early: bool = False) -> dict[str, Any]:
    """Return the states of callbacks by name; raise ConfigError unless they are JSON values.

    Before the first step, a callback whose state does not exist yet is left out.
    """
    states = {}
    for name, callback in _stateful(callbacks):
        try:
            states[name] = callback.state_dict()
        except Exception:
            if not is_early:
                raise
            continue
        try:
            to_json(states[name])
        except (TypeError, ValueError) as error:
            message = f"state_dict() of the callback {name} cannot be saved in run_dir: {error}"
            raise ConfigError(f"{message}; expected numbers, strings, lists and dicts") from error
    return states


def restore_states(callbacks: Sequence[Any], states: Mapping[str, Any]) -> None:
    """Give callbacks the states that `states_of` returned."""
    for name, callback in _stateful(callbacks):
        if name in states:
            callback.load_state_dict(states[name])


def _stateful(callbacks: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    """Yield the callbacks that have a state, under names that a resumed run has again."""
    counts: Counter[str] = Counter()
    for callback in callbacks:
        if hasattr(callback, "state_dict"):
            name = type(callback).__name__
            counts[name] += 1
            yield f"{name} {counts[name]}", callback


def to_json(value: Any) -> str:
    """Return a value as JSON, with numbers and arrays of any library as numbers and lists."""
    return json.dumps(value, default=_plain)


def _plain(value: Any) -> Any:
    if not hasattr(value, "tolist"):
        raise TypeError(f"{describe_type(value)} is no JSON value")
    return value.tolist()


def settings_of(model: Module) -> dict[str, str]:
    """Return as text what the arrays of a model do not tell: the class and the settings of each module, by name."""
    found: dict[str, str] = {}
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        found[f"{prefix}class"] = type(module).__qualname__
        for name in sorted({*module.__fields__} - module.__array_fields__):
            _describe(f"{prefix}{name}", getattr(module, name, None), found)
    return found


def check_settings(path: StrPath, model: Module, saved: Mapping[str, str]) -> None:
    """Raise CheckpointError if settings of a model differ from those saved in a file; others are not compared."""
    settings = settings_of(model)
    if changed := [name for name in settings if saved.get(name, settings[name]) != settings[name]]:
        name = changed[0]
        received = f"{path} is the state of a model with {name} {saved[name]}; expected {settings[name]}"
        raise CheckpointError(f"{received}, as in this one; use the same model, or another path")


def _describe(name: str, value: Any, found: dict[str, str]) -> None:
    if dataclasses.is_dataclass(value) and not isinstance(value, Module | type):
        for field in dataclasses.fields(value):
            _describe(f"{name}.{field.name}", getattr(value, field.name, None), found)
    elif text := _text(value):
        found[name] = text


def _text(value: Any) -> str:
    """Return a text that is the same in every process; arrays and modules have none."""
    if isinstance(value, np.generic):
        value = value.item()
    if is_array(value) or isinstance(value, Module | ModuleType):  # modules of Python, too: the library may change
        return ""
    if isinstance(value, dict):
        value = value.items()
    if isinstance(value, set | frozenset | ItemsView):
        return f"{{{', '.join(sorted(map(_text, value)))}}}"
    if isinstance(value, tuple | list):
        return f"({', '.join(map(_text, value))})"
    if name := getattr(value, "__qualname__", None):
        return f"{name} {_text_of_code(value)}" if name.endswith("<lambda>") else name
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


def _text_of_code(function: Any) -> str:
    """Return what tells functions without a name apart: the names, constants and code, and the numbers it captures."""
    code = getattr(function, "__code__", function)
    constants = [_text_of_code(each) if isinstance(each, CodeType) else _text(each) for each in code.co_consts]
    captured = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
    captured += getattr(function, "__defaults__", None) or ()
    values = [_text(value) for value in captured if isinstance(value, int | float | str)]  # others may change
    return " ".join([*code.co_names, *constants, *values, f"{zlib.crc32(code.co_code):x}"])


def _check_module(model: Any) -> None:
    if not isinstance(model, Module):
        raise ConfigError(f"model is {describe_type(model)}; expected a Module as the first argument")


def _arrays(model: Any, state: Any) -> dict[str, Any]:
    """Return the arrays of a model and of an optimizer's state, by name."""
    arrays = dict(model.named_arrays())
    for name, tree in _trees(state).items():
        arrays |= {f"{name}:{key}": leaf for key, leaf in tree.named_arrays()}
    int(state.step)
    return arrays


def _trees(state: Any) -> dict[str, Any]:
    """Return the trees of an optimizer's state, by name."""
    return {name: tree for name, tree in state._asdict().items() if name != "step" and tree is not None}


def _restore(tree: Any, arrays: Mapping[str, Any], prefix: str) -> Any:
    """Return the tree with the arrays of these names; raise KeyError or ShapeError if they do not fit."""
    current = dict(tree.named_arrays())
    return replace(tree, io.restore_like({name: arrays[prefix + name] for name in current}, current))
