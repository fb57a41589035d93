"""The steps of a search: the model extends all rows by one token, and rows move between steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from xformer.backends import Array, array_namespace, assign, backend_name
from xformer.errors import CaptureError
from xformer.models.cache import StaticCache
from xformer.replay.recording import Recording

_MIN_REPEATS = 1  # steps with the same rows before one is recorded, which takes as long as a few steps
_MIN_REMAINING = 4  # steps that may follow
# Tokens of a static cache: a replay attends to all of them, so the capacity grows with the output, from at least 32
# tokens and at most 128 for a single row, where attention takes little of the time.
_MIN_CAPACITY, _MAX_FIRST_CAPACITY = 32, 128


class DecodingSteps:
    """The model and the cache of a search.

    On NumPy, steps with the same rows are recorded and replayed, which spares the Python code of the model (see
    `xformer.capture`).

    Args:
        model: Object with `decode_step(tokens, cache)`.
        cache: Cache with one row per input.
        max_length: Largest number of tokens of a row.

    Attributes:
        cache: The cache; another one once steps are replayed.
    """

    def __init__(self, model: Any, cache: Any, max_length: int) -> None:
        self.cache, self._model, self._max_length = cache, model, max_length
        self._length, self._num_repeats = 0, 0
        self._recording: Recording | None = None
        config = model.config
        self._max_capacity = config.max_positions if config.positions == "learned" else math.inf
        self._can_replay = config.window is None and hasattr(model, "to_static")

    def step(self, tokens: Array) -> Array:
        """Append tokens (rows, new tokens) and return the logits of the next ones, (rows, vocabulary)."""
        num_tokens = int(tokens.shape[1])
        self._num_repeats = self._num_repeats + 1 if num_tokens == 1 else 0
        if self._recording is not None and self._length < self._capacity:
            logits = self._recording.replay((tokens,))
        elif self._should_record(tokens):
            logits = self._record(tokens)
        else:
            if isinstance(self.cache, StaticCache):
                self._reserve()
            logits = self._model.decode_step(tokens, self.cache)
        self._length += num_tokens
        return logits

    def reorder(self, rows: Sequence[int], inputs: Sequence[int] | None = None) -> None:
        """Replace row i by the former row rows[i]; arguments as of `DecodingCache.reorder`."""
        if inputs is not None or len(rows) != self._num_rows:
            self._recording, self._num_repeats = None, 0
        self.cache.reorder(rows, inputs)

    @property
    def _capacity(self) -> int:
        return self.cache.layers[0].self_attention.key.shape[2]

    @property
    def _num_rows(self) -> int | None:
        key = self.cache.layers[0].self_attention.key
        return None if key is None else int(key.shape[0])

    def _should_record(self, tokens: Array) -> bool:
        return (
            self._can_replay
            and self._num_repeats > _MIN_REPEATS
            and self._max_length - self._length > _MIN_REMAINING
            and backend_name(array_namespace(tokens)) == "numpy"
        )

    def _record(self, tokens: Array) -> Array:
        """Make a step with a static cache, and record it."""
        self._reserve()
        xp = array_namespace(tokens)
        tokens, index = (xp.asarray(array, copy=True) for array in (tokens, self.cache.index))
        try:
            self._recording = Recording(type(self._model).decode_step, (self._model, tokens, self.cache), {}, (tokens,))
        except CaptureError:  # a model of the user that reads values on the host
            self._can_replay, self._recording = False, None
            assign(self.cache.index, index)  # part of the step was made
            return self._model.decode_step(tokens, self.cache)
        return self._recording.result

    def _reserve(self) -> None:
        """Make the cache static, with space for at least one more token."""
        if isinstance(self.cache, StaticCache) and self._length < self._capacity:
            return
        first = max(_MIN_CAPACITY, min(self._max_length, _MAX_FIRST_CAPACITY // (self._num_rows or 1)))
        capacity = max(first, 2 ** math.ceil(math.log2(self._length + 1)))
        self.cache = self._model.to_static(self.cache, int(min(capacity, self._max_capacity)))
        self._recording = None  # of the smaller cache
