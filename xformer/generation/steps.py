"""The steps of a search: the model extends all rows by one token, and rows move between steps."""

from __future__ import annotations

import math
import weakref
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import Any

from xformer.backends import Array, array_namespace, assign, device, from_host
from xformer.errors import JitError
from xformer.models.cache import StaticCache
from xformer.threads import available_threads, fork_safe_lock
from xformer.tracing.activations import is_observing
from xformer.tracing.program import compiler
from xformer.tree import flatten

_MIN_REPEATS = 1  # steps with the same rows before one is traced, which takes as long as a few steps
_MIN_LENGTH = 6  # of the longest output: shorter searches use no static cache
# Tokens of a static cache: a program attends to all of them, so the capacity grows with the output, from at least 32
# tokens and at most 128 for a single row, where attention takes little of the time.
_MIN_CAPACITY, _MAX_FIRST_CAPACITY = 32, 128


class KeptPrograms:
    """Programs of steps by model and shapes, and the caches with the arrays that they change, for later searches.

    The programs of an entry, one for each number of new tokens per row with or without all logits, share one cache.

    An entry is checked out while in use, so that no two threads share one. The least recently used entries of a model
    are dropped first; all are freed with the model.

    Args:
        max_entries: Maximum number of entries of a model.
        max_bytes: Maximum size of the arrays of a model's entries together.
    """

    def __init__(self, max_entries: int, max_bytes: int) -> None:
        self._max_entries, self._max_bytes = max_entries, max_bytes
        self._models: weakref.WeakKeyDictionary[Any, OrderedDict[Hashable, tuple[StaticCache, Any, int]]]
        self._models = weakref.WeakKeyDictionary()
        self._lock = fork_safe_lock()

    def take(self, model: Any, key: Hashable) -> tuple[StaticCache, Any] | None:
        """Remove and return the cache and the programs of a key, or return None."""
        with self._lock:
            entry = self._models.get(model, OrderedDict()).pop(key, None)
            return None if entry is None else entry[:2]

    def keep(self, model: Any, key: Hashable, cache: StaticCache, programs: dict[Any, Any]) -> None:
        """Keep programs and their cache."""
        nbytes = sum(each.nbytes for each in (*programs.values(), *cache.arrays()) if each is not None)
        with self._lock:
            entries = self._models.setdefault(model, OrderedDict())
            entries.pop(key, None)
            entries[key] = cache, programs, nbytes
            while len(entries) > self._max_entries or sum(entry[2] for entry in entries.values()) > self._max_bytes:
                entries.popitem(last=False)


_kept = KeptPrograms(max_entries=64, max_bytes=2**28)


class DecodingSteps:
    """The model and the cache of a search; close it after the last step.

    On NumPy and CuPy, a step with the same rows is traced and then runs as a program, without the Python code of the
    model (see `xformer.jit`). Programs are kept for later searches with the same shapes, whose inputs are copied into
    their arrays. Which steps run as programs does not change the results: from the second step on, all use a static
    cache.

    Args:
        model: Object with `decode_step(tokens, cache)`.
        cache: Cache with one row per input.
        max_length: Largest number of tokens of a row.
        sources: Length of the source of each input; empty for a language model.

    Attributes:
        cache: The cache; another one once it is static.
    """

    def __init__(self, model: Any, cache: Any, max_length: int, sources: Sequence[int] = ()) -> None:
        self.cache, self._model, self._max_length, self._sources = cache, model, max_length, list(sources)
        self._lengths: list[int] = []  # of the rows
        self._num_repeats = 0
        self._new_program: Any = None
        self._programs: dict[Any, Any] = {}  # of the shapes of the cache, by the number of new tokens and the options
        self._used: tuple[Hashable, StaticCache, dict[Any, Any]] | None = None  # the last programs, with their arrays
        self._is_static = hasattr(model, "to_static") and max_length >= _MIN_LENGTH
        self._can_trace = True
        self._is_own = False  # whether no program has the keys and values of the tokens

    def prefill(self, tokens: Array, lengths: list[int]) -> Array:
        """Enter the first tokens (rows, tokens), and return the logits of the next ones, (rows, vocabulary).

        Args:
            tokens: Ids; shorter rows end with padding.
            lengths: Number of tokens of each row.
        """
        self._lengths = lengths
        self._new_program = None if is_observing() else compiler(array_namespace(tokens))
        is_ragged = min(lengths) < max(lengths)
        self._is_static = is_ragged or (self._is_static and self._new_program is not None)
        options = {}
        if is_ragged:
            options = {"lengths": from_host(array_namespace(tokens), lengths, dtype="int64", device=device(tokens))}
        return self._model.decode_step(tokens, self.cache, **options)

    def step(self, tokens: Array, *, all_logits: bool = False) -> Array:
        """Append tokens to each row; arguments and result are those of `decode_step`.

        Args:
            tokens: Ids (rows, new tokens).
            all_logits: Return the logits after each new token.

        Returns:
            Logits (rows, vocabulary), or with all_logits (rows, new tokens, vocabulary).
        """
        self._num_repeats += 1
        self._is_static |= tokens.shape[1] > 1
        options = {"all_logits": True} if all_logits else {}
        logits = (self._static_step if self._is_static else self._decode)(tokens, options)
        self._lengths = [length + tokens.shape[1] for length in self._lengths]
        return logits

    def _decode(self, tokens: Array, options: dict[str, Any]) -> Array:
        return self._model.decode_step(tokens, self.cache, **options)

    def drop(self, counts: Sequence[int]) -> None:
        """Remove the last `counts[i]` tokens of row i."""
        self._is_static = True
        self._fit(0)
        self._lengths = [max(0, length - count) for length, count in zip(self._lengths, counts, strict=True)]
        lengths = self.cache.lengths
        lengths = from_host(array_namespace(lengths), self._lengths, dtype=lengths.dtype, device=device(lengths))
        self.cache.lengths = assign(self.cache.lengths, lengths)

    def put(self, rows: Sequence[int], inputs: Sequence[int], other: DecodingSteps) -> None:
        """Replace rows and inputs by those of other steps of the model."""
        for row, length in zip(rows, other._lengths, strict=True):
            self._lengths[row] = length
        for place, size in zip(inputs, other._sources, strict=bool(self._sources)):
            self._sources[place] = size
        self._max_length = max(self._max_length, other._max_length)
        self._is_static = True
        self._fit(1)
        before = self._shapes()
        self.cache.put(rows, inputs, other.cache)
        if before != self._shapes():
            self._programs, self._num_repeats = {}, 0
        other.close()

    def reorder(self, rows: Sequence[int], inputs: Sequence[int] | None = None) -> None:
        """Replace row i by the former row rows[i]; arguments as of `DecodingCache.reorder`."""
        if inputs is not None or len(rows) != len(self._lengths):
            self._programs, self._num_repeats = {}, 0
        self._lengths = [self._lengths[row] for row in rows]
        if inputs is not None and self._sources:
            self._sources = [self._sources[place] for place in inputs]
        self.cache.reorder(rows, inputs)

    def release(self, rows: Sequence[int]) -> None:
        """Note that rows are not used any more."""
        for row in rows:
            self._lengths[row] = 0

    def close(self) -> None:
        """Keep the last programs for other searches."""
        if self._used is not None:
            _kept.keep(self._model, *self._used)
        self._used = None

    def _shapes(self) -> list[Any]:
        """Return the shape and dtype of each array of the cache."""
        return [None if array is None else (array.shape, array.dtype) for array in self.cache.arrays()]

    def _static_step(self, tokens: Array, options: dict[str, Any]) -> Array:
        """Make a step with a static cache, by a program if there is one or the step should be traced."""
        self._fit(tokens.shape[1])
        if is_observing():
            return self._decode(tokens, options)
        if not self._programs:
            key = self._key()
            kept = _kept.take(self._model, key)
            if kept is not None:
                self._use(key, *kept)
        if program := self._programs.get((tokens.shape[1], *options)):
            return program.run((tokens,))
        if self._can_trace and self._new_program is not None and self._num_repeats > _MIN_REPEATS:
            return self._trace(tokens, options)
        return self._decode(tokens, options)

    def _fit(self, num_tokens: int) -> None:
        """Make the cache static, with space for new tokens of each row and not for many times as many."""
        longest_row = max(self._lengths)
        # In steps of 32, since limits often depend on the input.
        longest = _MIN_CAPACITY * math.ceil(self._max_length / _MIN_CAPACITY)
        first = max(_MIN_CAPACITY, min(longest, _MAX_FIRST_CAPACITY // len(self._lengths)))
        capacity = max(first, 2 ** math.ceil(math.log2(longest_row + num_tokens)))
        size = self.cache.layers[0].self_attention.key.shape[2]  # of rows that have ended, too
        if not isinstance(self.cache, StaticCache) or not longest_row + num_tokens <= size < 4 * capacity:
            self.cache = self._model.to_static(self.cache, capacity)
            self._programs, self._is_own = {}, True
        self.cache.length = longest_row
        if self._sources:
            count, memory = len(self._lengths) // len(self._sources), self.cache.memory
            used = max(self._sources[row // count] for row, length in enumerate(self._lengths) if length)
            if memory is not None and 4 * used < memory.states.shape[1]:
                self.cache.cut_memory(used)
                self._programs, self._num_repeats = {}, 0

    def _key(self) -> Hashable:
        """Return a key that searches with the same programs share."""
        parameters = map(id, flatten(self._model)[0])  # the programs keep these arrays alive
        return type(self._model).decode_step, available_threads(), *parameters, *self._shapes()

    def _use(self, key: Hashable, cache: StaticCache, programs: dict[Any, Any]) -> None:
        """Continue with kept programs, whose arrays and length become those of the cache."""
        for target, source in zip(cache.arrays(), self.cache.arrays(), strict=True):
            if target is not None and source is not None:
                assign(target, source)
        kept = cache.alias()
        kept.length = self.cache.length
        self.cache, self._programs, self._is_own = kept, programs, False
        self.close()  # nothing uses the arrays of the last programs any more
        self._used = key, cache, programs

    def _trace(self, tokens: Array, options: dict[str, Any]) -> Array:
        """Make a step and trace it, with arrays that no programs for other shapes of the cache have."""
        if not self._programs:
            key = self._key()
            self.cache, self._is_own = self.cache.copy(shares_tokens=self._is_own), False
        xp = array_namespace(tokens)
        tokens, lengths = (xp.asarray(array, copy=True) for array in (tokens, self.cache.lengths))
        try:
            arguments = (self._model, tokens, self.cache)
            program = self._new_program(type(self._model).decode_step, arguments, options, (tokens,))
        except JitError:  # a model of the user that reads values on the host
            self._can_trace = False
            assign(self.cache.lengths, lengths)  # part of the step was made
            return self._decode(tokens, options)
        logits, program.result = program.result, None
        if not self._programs:
            self.close()
            self._used = key, self.cache.alias(), self._programs
        self._programs[tokens.shape[1], *options] = program
        return logits
