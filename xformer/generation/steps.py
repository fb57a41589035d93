"""The steps of a search: prefixes enter the model, then it extends all rows by one token, and rows move in between."""

from __future__ import annotations

import collections
import functools
import importlib
import math
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import numpy as np

from xformer import native
from xformer.backends import Array, array_namespace, assign, device
from xformer.errors import JitError
from xformer.generation.batch import GenerationBatch, Sources
from xformer.layers.cache import DecodingCache, with_size
from xformer.ops import decoding
from xformer.ops.decoding import GREEDY, kernel_settings
from xformer.threads import available_threads, fork_safe_lock
from xformer.tracing.activations import is_observing, open_blocks
from xformer.tracing.program import compiler
from xformer.tree import flatten

_MAX_PADDING = 32  # of a prompt, or a quarter of the longest one: another pass through the model takes about as long
_MIN_REPEATS = 1  # steps with the same rows before one is traced, which takes as long as a few steps
_MIN_LENGTH = 6  # of the longest output: in shorter searches the cache grows
# Tokens of a cache of fixed shape: a program attends to all of them, so the capacity grows with the output, from at
# least 32 tokens and at most 128 for a single row, where attention takes little of the time.
_MIN_CAPACITY, _MAX_FIRST_CAPACITY = 32, 128
_CHUNK = 4  # steps whose tokens the host reads together, while a GPU makes as many further ones
_CHUNK_TIME = 1e-3  # seconds; on a CPU, chunks that take less are doubled


class ProgramPool:
    """Programs of steps by model and shapes, and the caches with the arrays that they change, for later searches.

    The programs of an entry, one for each number of new tokens per row with or without all logits, share one cache.

    An entry leaves the pool while in use, so that no two threads share one. The least recently used entries of a model
    are dropped first; all are freed with the model.

    Args:
        max_entries: Maximum number of entries of a model.
        max_bytes: Maximum size of the arrays of a model's entries together; see `Library.program_bytes`.
    """

    def __init__(self, max_entries: int, max_bytes: int) -> None:
        self._max_entries, self._max_bytes = max_entries, max_bytes
        self._models: weakref.WeakKeyDictionary[Any, OrderedDict[Hashable, tuple[DecodingCache, Any, int]]]
        self._models = weakref.WeakKeyDictionary()
        self._lock = fork_safe_lock()

    def acquire(self, model: Any, key: Hashable) -> tuple[DecodingCache, Any] | None:
        """Remove and return the cache and the programs of a key, or return None."""
        with self._lock:
            entry = self._models.get(model, OrderedDict()).pop(key, None)
            return None if entry is None else entry[:2]

    def release(self, model: Any, key: Hashable, cache: DecodingCache, programs: dict[Any, Any]) -> None:
        """Put programs and their cache into the pool."""
        arrays = [array for array in cache.arrays() if array is not None]
        nbytes = sum(each.nbytes for each in (*programs.values(), *arrays))
        max_bytes = array_namespace(*arrays).program_bytes(self._max_bytes)
        with self._lock:
            entries = self._models.setdefault(model, OrderedDict())
            entries.pop(key, None)
            entries[key] = cache, programs, nbytes
            while len(entries) > self._max_entries or sum(entry[2] for entry in entries.values()) > max_bytes:
                entries.popitem(last=False)


_pool = ProgramPool(max_entries=64, max_bytes=2**28)


class DecodingSteps:
    """The model and the cache of a search; close it after the last step.

    On NumPy and CuPy, a step with the same rows is traced and then runs as a program, without the Python code of the
    model (see `xformer.jit`). On NumPy, programs call the open blocks of `record` and `intervene`. Programs are kept
    for later searches with the same shapes, whose inputs are copied into their arrays. Which steps run as programs does
    not change the results: from the second step on, the cache of all has a fixed shape.

    Args:
        model: Object with `decode_step(tokens, cache)`.
        cache: Cache with one row per input.
        max_length: Largest number of tokens of a row.

    Attributes:
        cache: The cache; another one once it has a fixed shape.
        can_look_ahead: Whether `look_ahead` can make steps.
    """

    def __init__(self, model: Any, cache: Any, max_length: int) -> None:
        self.cache, self._model, self._max_length = cache, model, max_length
        self._lengths = np.zeros(0, dtype=np.int64)  # of the rows
        self._num_repeats = 0
        self._new_program: Any = None
        self._programs: dict[Any, Any] = {}  # of the shapes of the cache, by the number of new tokens and the options
        self._used: tuple[Hashable, DecodingCache, dict[Any, Any]] | None = None  # the last programs and their arrays
        self._is_fixed = hasattr(model, "to_static") and max_length >= _MIN_LENGTH
        self._blocks: Hashable = ()  # of `record` and `intervene`, that the last step has seen
        self.can_look_ahead = self._is_on_device = False

    def prefill(self, tokens: Array, lengths: Sequence[int]) -> Array:
        """Enter the first tokens (rows, tokens), and return the logits of the next ones, (rows, vocabulary).

        Args:
            tokens: Ids; shorter rows end with padding.
            lengths: Number of tokens of each row.
        """
        self._lengths, xp = np.asarray(lengths, dtype=np.int64), array_namespace(tokens)
        self._blocks, self._is_on_device = open_blocks(), xp.graph_capture() is not None
        self._new_program = None if self._needs_python else compiler(xp)
        is_ragged = min(lengths) < max(lengths)
        self._is_fixed = is_ragged or (self._is_fixed and self._new_program is not None)
        options = {"lengths": xp.from_host(lengths, dtype="int64", device=device(tokens))} if is_ragged else {}
        logits = self._model.decode_step(tokens, self.cache, **options)
        self.can_look_ahead = self._new_program is not None and (self._is_on_device or decoding.is_native(logits))
        return logits

    def step(self, tokens: Array, *, all_logits: bool = False) -> Array:
        """Append tokens to each row; arguments and result are those of `decode_step`.

        Args:
            tokens: Ids (rows, new tokens).
            all_logits: Return the logits after each new token.

        Returns:
            Logits (rows, vocabulary), or with all_logits (rows, new tokens, vocabulary).
        """
        num_tokens, options = tokens.shape[1], {"all_logits": True} if all_logits else {}
        self._follow_blocks()
        self._num_repeats += 1
        self._is_fixed |= num_tokens > 1
        if self._is_fixed:
            self._fit(num_tokens)
        self._lengths += num_tokens
        if not self._is_fixed or self._needs_python:
            return self._model.decode_step(tokens, self.cache, **options)
        if not self._programs:
            self._reuse()
        if program := self._programs.get((num_tokens, *options)):
            return program.run((tokens,))
        if self._new_program is not None and self._num_repeats > _MIN_REPEATS:
            return self._trace(tokens, options)
        return self._model.decode_step(tokens, self.cache, **options)

    def look_ahead(self, tokens: Any, mask: Any, uniforms: Any, settings: dict[str, Any]) -> Iterator[Any]:
        """Make steps that append a token to each row, which their program chooses and the host reads later.

        They end before one that needs a larger cache, and if most rows are released, which go on as the others do.

        Args:
            tokens: Ids (rows, 1), as a NumPy array.
            mask: Tokens that are not chosen, as booleans (vocabulary,).
            uniforms: Random numbers for the tokens of each step, (steps, rows).
            settings: Those of `ops.decoding.choose`.

        Yields:
            Ids and log-probabilities of some steps, (steps, rows, 2).
        """
        self._follow_blocks()
        # Steps of several rows go on with those that have ended, which blocks must not see.
        if not self._is_fixed or self._needs_python or (self._blocks and len(self._lengths) > 1):
            return
        self._fit(1)
        if not self._programs:
            self._reuse()
        if "choices" not in self._programs:
            if self._num_repeats < _MIN_REPEATS:
                return
            self._own_arrays()
            self._keep("choices", Choices(self.cache, self._model.vocab_size))
        choices, num_made, waiting = self._programs["choices"], 0, collections.deque[Any]()
        choices.start(tokens, mask, uniforms, settings)
        chunk, most = (_CHUNK, 2) if self._is_on_device else (1, 1)  # steps, and chunks of them that wait
        while True:
            is_sparse = 4 * np.count_nonzero(self._lengths) <= len(self._lengths)
            while len(waiting) < most and not is_sparse:
                size = min(chunk, len(uniforms) - num_made, self.cache.capacity - int(self._lengths.max()))
                if size <= 0:
                    break
                start, rest = time.perf_counter(), size
                if choices.program is None:  # its trace makes a step
                    choices.program = self._traced(lambda: choices.trace(self._new_program, self._model, self.cache))
                    if choices.program is None:
                        return
                    rest -= 1
                choices.program.repeat(rest)
                if not self._is_on_device and not self._blocks and time.perf_counter() - start < _CHUNK_TIME:
                    chunk *= 2
                waiting.append(choices.read_later(num_made, size))
                num_made += size
                self._lengths[self._lengths > 0] += size  # those of released rows are zero
            if not waiting:
                break
            yield waiting.popleft()()
            if open_blocks() != self._blocks:
                return

    def drop(self, counts: Any) -> None:
        """Remove the last `counts[i]` tokens of row i."""
        self._is_fixed = True
        self._fit(0)
        self._lengths = np.maximum(0, self._lengths - counts)
        old = self.cache.lengths
        lengths = array_namespace(old).from_host(self._lengths.tolist(), dtype=old.dtype, device=device(old))
        self.cache.lengths = assign(old, lengths)

    def put(self, rows: Sequence[int], inputs: Sequence[int], other: DecodingSteps) -> None:
        """Replace rows and inputs by those of other steps of the model."""
        self._lengths[rows] = other._lengths
        self._max_length = max(self._max_length, other._max_length)
        self._is_fixed = True
        self._fit(1)
        before = self._shapes()
        self.cache.put(rows, inputs, other.cache)
        if before != self._shapes():
            self._forget()
        other.close()

    def reorder(self, rows: Sequence[int], inputs: Sequence[int] | None = None) -> None:
        """Replace row i by the former row rows[i]; arguments as of `DecodingCache.reorder`."""
        if inputs is not None or len(rows) != len(self._lengths):
            self._forget()
        self._lengths = self._lengths[list(rows)]
        self.cache.reorder(rows, inputs)

    def cut_memory(self, size: int) -> None:
        """Keep the first `size` keys of the sources if there are many times as many."""
        if self._is_fixed and self.cache.memory is not None and 4 * size < self.cache.memory.states.shape[1]:
            self._fit(0)
            self.cache.cut_memory(size)
            self._forget()

    def release(self, rows: Any) -> None:
        """Mark rows as unused; `rows` is anything that indexes a NumPy array."""
        self._lengths[rows] = 0

    def close(self) -> None:
        """Return the last programs to the pool."""
        if self._used is not None:
            _pool.release(self._model, *self._used)
        self._used = None

    def _follow_blocks(self) -> None:
        """Use no program of other blocks of `record` and `intervene` than those that are open."""
        if open_blocks() != self._blocks:
            self._blocks = open_blocks()
            self._forget()

    @property
    def _needs_python(self) -> bool:
        """Return whether blocks are open, into which a CUDA graph does not call."""
        return self._is_on_device and is_observing()

    def _forget(self) -> None:
        """Use no program until a step has been made with the new shapes."""
        self._programs, self._num_repeats = {}, 0

    def _shapes(self) -> list[Any]:
        """Return the shape and dtype of each array of the cache."""
        return [None if array is None else (array.shape, array.dtype) for array in self.cache.arrays()]

    def _fit(self, num_tokens: int) -> None:
        """Give the cache a fixed shape, with space for new tokens of each row and not for many times as many."""
        longest_row = int(self._lengths.max())
        # In steps of 32, since limits often depend on the input.
        longest = _MIN_CAPACITY * math.ceil(self._max_length / _MIN_CAPACITY)
        first = max(_MIN_CAPACITY, min(longest, _MAX_FIRST_CAPACITY // len(self._lengths)))
        capacity = max(first, 2 ** math.ceil(math.log2(longest_row + num_tokens)))
        size = getattr(self.cache, "capacity", None)  # of rows that have ended, too
        if size is None or not longest_row + num_tokens <= size < 4 * capacity:
            self.cache = self._model.to_static(self.cache, capacity)
            self._programs = {}
        self.cache.length = longest_row

    def _reuse(self) -> None:
        """Continue with programs of the pool, whose arrays and length become those of the cache."""
        key = self._key()
        entry = _pool.acquire(self._model, key)
        if entry is not None:
            kept, programs = entry
            for target, source in zip(kept.arrays(), self.cache.arrays(), strict=True):
                if target is not None and source is not None:
                    assign(target, source)
            length, self.cache, self._programs = self.cache.length, kept.alias(), programs
            self.cache.length = length
            self.close()  # nothing uses the arrays of the last programs any more
            self._used = key, kept, programs

    def _key(self) -> Hashable:
        """Return a key that searches with the same programs share."""
        parameters = map(id, flatten(self._model)[0])  # the programs keep these arrays alive
        settings = type(self._model).decode_step, available_threads(), native.is_reproducible(), self._blocks
        return *settings, *parameters, *self._shapes()

    def _trace(self, tokens: Array, options: dict[str, Any]) -> Array:
        """Make a step and trace it, with arrays that no programs for other shapes of the cache have."""
        self._own_arrays()
        tokens = array_namespace(tokens).asarray(tokens, copy=True)
        arguments, function = (self._model, tokens, self.cache), type(self._model).decode_step
        program = self._traced(lambda: self._new_program(function, arguments, options, (tokens,)))
        if program is None:
            return self._model.decode_step(tokens, self.cache, **options)
        logits, program.result = program.result, None
        self._keep((tokens.shape[1], *options), program)
        return logits

    def _traced(self, make: Callable[[], Any]) -> Any:
        """Return what a function that traces a step returns; None for a model of the user that reads values."""
        lengths = array_namespace(self.cache.lengths).asarray(self.cache.lengths, copy=True)
        try:
            return make()
        except JitError:
            self._new_program, self.can_look_ahead = None, False
            assign(self.cache.lengths, lengths)  # part of the step was made
            return None

    def _own_arrays(self) -> None:
        """Copy arrays that belong to programs for other shapes of the cache."""
        if not self._programs and self._used is not None:
            self.cache = self.cache.without(self._used[1].arrays())

    def _keep(self, key: Hashable, program: Any) -> None:
        """Add a program to those of the cache."""
        if not self._programs:
            pool_key = self._key()
            self.close()
            self._used = pool_key, self.cache.alias(), self._programs
        self._programs[key] = program


# --- Prefixes ---------------------------------------------------------------------------------------------------------


def prefill(batches: Sequence[GenerationBatch]) -> tuple[DecodingSteps, Array]:
    """Enter the prefixes of batches, one row per input; return further steps and the next logits.

    Prompts of similar lengths enter a language model together, so that little padding is computed, and equal prompts
    once, such as those of the samples of a text.
    """
    first = batches[0]
    rows = [(*batch.start, *batch.prefixes[index]) for batch in batches for index in batch.inputs]
    sources = [batch.sources for batch in batches if batch.sources is not None]
    if sources or is_observing():  # which sees each row
        return _prefill(batches, rows, sources)
    slots = {prompt: slot for slot, prompt in enumerate(dict.fromkeys(rows))}
    steps, logits = _prefill(batches, list(slots), sources)
    if len(slots) < len(rows):
        parents = [slots[row] for row in rows]
        steps.reorder(parents)
        logits = first.take(logits, parents)
    return steps, logits


def _prefill(
    batches: Sequence[GenerationBatch], rows: Sequence[tuple[int, ...]], sources: Sequence[Sources]
) -> tuple[DecodingSteps, Array]:
    """Enter rows of tokens; see `prefill`."""
    first = batches[0]
    maximum = max(batch.lengths.ranges[index].maximum for batch in batches for index in batch.inputs)
    groups: list[list[int]] = []
    for row in sorted(range(len(rows)), key=lambda row: -len(rows[row])):
        longest = len(rows[groups[-1][0]]) if groups else 0
        if groups and (sources or longest - len(rows[row]) <= max(_MAX_PADDING, longest // 4)):
            groups[-1].append(row)
        else:
            groups.append([row])
    groups = [sorted(group) for group in groups]

    def enter(group: Sequence[int]) -> tuple[DecodingSteps, Array]:
        prompts = [rows[row] for row in group]
        lengths = list(map(len, prompts))
        tokens = first.to_device([[*row, *[0] * (max(lengths) - len(row))] for row in prompts])
        cache = _encode(first.model, sources) if sources else first.model.init_cache(len(group))
        longest = len(first.start) + maximum + first.num_draft_tokens
        steps = DecodingSteps(first.model, cache, longest)
        if len(rows) == 1 and first.prefix_cache is not None and first.uses_prefix_cache:
            tokens = tokens[:, first.prefix_cache.prefill(first.model, prompts[0], cache, first.to_device) :]
        return steps, steps.prefill(tokens, lengths)

    (steps, logits), *others = [enter(group) for group in groups]
    if others:
        slot = {row: index for index, row in enumerate(row for group in groups for row in group)}
        steps.reorder([slot[row] if slot[row] < len(groups[0]) else 0 for row in range(len(rows))])
        for group, (other, _) in zip(groups[1:], others, strict=True):
            steps.put(group, [], other)
        logits = first.xp.concat([logits, *(each for _, each in others)], axis=0)
        logits = first.take(logits, [slot[row] for row in range(len(rows))])
    return steps, logits


def _encode(model: Any, sources: Sequence[Sources]) -> Any:
    """Return the cache of an encoder-decoder; the shorter sources are padded."""
    (ids, mask, lengths), *others = sources
    if others:
        xp, size, pad_id = array_namespace(ids), max(each.ids.shape[1] for each in sources), model.config.pad_id
        if model.config.source_padding_id is None:  # otherwise the model finds the padding itself
            mask = xp.concat([with_size(_mask_of(each), size, 3) for each in sources], axis=0)
        ids = xp.concat([with_size(each.ids, size, 1, fill=pad_id or 0) for each in sources], axis=0)
        lengths = None if lengths is None else [length for each in sources for length in each.lengths or ()]
    return model.prefill(ids, lengths=lengths, **({} if mask is None else {"source_mask": mask}))


def _mask_of(source: Sources) -> Array:
    xp, (rows, length) = array_namespace(source.ids), source.ids.shape[:2]
    return (
        xp.ones((rows, 1, 1, length), dtype=xp.bool, device=device(source.ids)) if source.mask is None else source.mask
    )


# --- Steps that choose their own tokens, which the host reads later ---------------------------------------------------


class Choices:
    """A program of a step and of the choice of its tokens, which are the input of the next one, and its arrays.

    Args:
        cache: Cache of fixed shape.
        num_tokens: Size of the vocabulary.

    Attributes:
        program: The program; None until a step was made.
    """

    def __init__(self, cache: Any, num_tokens: int) -> None:
        like, rows, steps = cache.lengths, len(cache.lengths), cache.capacity
        integers, reals = ((rows, 1), (rows,)), ((steps, rows), (4,), (steps, rows, 2))
        shapes = *((x, "int64") for x in integers), ((num_tokens,), "bool"), *((x, "float64") for x in reals)
        xp = array_namespace(like)
        # Those that the kernel takes, in this order.
        self._arrays = [xp.zeros(shape, dtype=xp.dtype_named(name), device=device(like)) for shape, name in shapes]
        name = "native" if xp.graph_capture() is None else "cupy.decoding"
        self._kernels = importlib.import_module(f"xformer.kernels.{name}")
        self.program: Any = None

    @property
    def nbytes(self) -> int:
        """Size of its arrays, and of the memory of its program."""
        return sum(each.nbytes for each in (*self._arrays, self.program) if each is not None)

    def start(self, tokens: Any, mask: Any, uniforms: Any, settings: dict[str, Any]) -> None:
        """Set what the next steps read; see `DecodingSteps.look_ahead`."""
        padded = np.zeros(self._arrays[3].shape)
        padded[: len(uniforms)] = uniforms[: len(padded)]
        hosts = tokens, np.zeros(len(tokens)), mask, padded, kernel_settings(**settings or GREEDY)
        for array, host in zip(self._arrays, hosts, strict=False):
            assign(array, array_namespace(array).from_host(host, dtype=array.dtype, device=device(array)))

    def trace(self, new_program: Callable[..., Any], model: Any, cache: Any) -> Any:
        """Make the first step, and return its program."""
        return new_program(functools.partial(_step, self._kernels.choose_into), (model, cache, *self._arrays), {})

    def read_later(self, first: int, count: int) -> Callable[[], Any]:
        """Return a function that returns what steps chose, (steps, rows, 2), and waits for no later ones."""
        return self._kernels.read_later(self._arrays[-1][first : first + count])


def _step(choose_into: Callable[..., None], model: Any, cache: Any, tokens: Any, *arrays: Any) -> None:
    choose_into(model.decode_step(tokens, cache), tokens, *arrays)
