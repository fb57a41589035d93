"""Files of results that depend on a machine: of comparisons of kernels, and of measurements."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from xformer.environment import env_value, on_clear
from xformer.errors import CheckpointError
from xformer.io import read_json, write_json


def cache_directory() -> Path:
    """Return the user's cache directory; RuntimeError if there is no home directory."""
    return Path(env_value("XDG_CACHE_HOME") or Path.home() / ".cache") / "xformer"


class CacheFile:
    """A JSON file of results in the user's cache directory, by what they depend on, such as versions, and by a key.

    Without such a directory, or if the file cannot be read or written, results last as long as the process.

    Args:
        name: Name of the file.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._results: dict[str, Any] | None = None
        on_clear(self._forget)

    @property
    def path(self) -> Path:
        """Path of the file."""
        return cache_directory() / self._name

    def get(self, identity: str, key: str) -> Any:
        """Return a result, or None."""
        return self.all(identity).get(key)

    def all(self, identity: str) -> dict[str, Any]:
        """Return all results of an identity by their keys."""
        if self._results is None:
            self._results = self._read()
        return self._results.get(identity, {})

    def set(self, identity: str, key: str, result: Any) -> None:
        """Keep a result, beside those that other processes have written meanwhile."""
        merged = self._read()
        for each, results in (*(self._results or {}).items(), (identity, {key: result})):
            merged.setdefault(each, {}).update(results)
        self._results = merged
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_json(self.path, merged)
        except (OSError, RuntimeError, CheckpointError):
            return

    def _read(self) -> dict[str, Any]:
        try:
            found = read_json(self.path, "results").items()
        except (OSError, RuntimeError, CheckpointError):  # without the file, or a home directory
            return {}
        return {identity: results for identity, results in found if isinstance(results, dict)}

    def _forget(self) -> None:
        self._results = None
