"""Programs of models, kept for later inputs with the same shapes."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Hashable
from typing import Any, Generic, TypeVar

from xformer.threads import fork_safe_lock

Entry = TypeVar("Entry")


class KeptPrograms(Generic[Entry]):
    """Programs by model and shapes, and the arrays that they read and write.

    An entry is checked out while in use, so that no two threads share one. The least recently used entries of a model
    are dropped first; all are freed with the model.

    Args:
        max_entries: Maximum number of entries of a model.
        max_bytes: Maximum size of the arrays of a model's entries together.
    """

    def __init__(self, max_entries: int, max_bytes: int) -> None:
        self._max_entries, self._max_bytes = max_entries, max_bytes
        self._models: weakref.WeakKeyDictionary[Any, OrderedDict[Hashable, tuple[Entry, int]]]
        self._models = weakref.WeakKeyDictionary()
        self._lock = fork_safe_lock()

    def take(self, model: Any, key: Hashable) -> Entry | None:
        """Remove and return the entry of a key, or return None."""
        with self._lock:
            entries = self._models.get(model, OrderedDict())
            return entries.pop(key)[0] if key in entries else None

    def keep(self, model: Any, key: Hashable, entry: Entry, nbytes: int) -> None:
        """Keep an entry whose arrays have this size."""
        with self._lock:
            entries = self._models.setdefault(model, OrderedDict())
            entries[key] = entry, nbytes
            entries.move_to_end(key)
            while len(entries) > self._max_entries or sum(size for _, size in entries.values()) > self._max_bytes:
                entries.popitem(last=False)
