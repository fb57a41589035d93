"""The loop of generation: every step extends the rows of all searches by one token, or by several draft tokens.

A search is a generator: it receives the logits of its rows, may yield a `SampleRequest` to have a token of each row
chosen, and yields `NextTokens`. Greedy search, sampling, beam search and assisted search are such generators.
Searches may begin and end at any step, and their rows may have any lengths.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import numpy as np

from xformer.backends import Array, array_namespace, device
from xformer.generation.batch import Chosen, GenerationBatch, SampleRequest, Steps
from xformer.generation.sampling import choose, greedy_or_sample
from xformer.generation.steps import DecodingSteps, prefill

Algorithm = Callable[[GenerationBatch, Array], Steps]
"""Function of a batch and the first logits, (inputs, vocabulary), that makes the generator of a search."""


class Search(Future[Any]):
    """A search in an engine, and the future of its result.

    Args:
        batch: Its inputs.
        algorithm: Makes its generator.

    Attributes:
        pending: A `SampleRequest`, then its `NextTokens`; None if it has ended.
        slots: Slot of each of its inputs in the cache, as a NumPy array.
    """

    def __init__(self, batch: GenerationBatch, algorithm: Algorithm) -> None:
        super().__init__()
        self.batch, self.algorithm = batch, algorithm
        self.pending: Any = None
        self.slots: Any = None
        self._generator: Any = None

    def advance(self, answer: Any) -> None:
        """Continue with the logits of the rows or the result of a choice; an error ends this search only."""
        if self.done():
            return
        try:
            if self._generator is None:
                self._generator = self.algorithm(self.batch, answer)
                self.pending = next(self._generator)
            else:
                self.pending = self._generator.send(answer)
        except StopIteration as end:
            self.pending = None
            self.set_result(end.value)
        except Exception as error:  # noqa: BLE001 - `result` raises it
            self.fail(error)

    def fail(self, error: BaseException | None) -> None:
        """End the search, unless it has ended: `result` then raises the error, or returns None if that is None."""
        if not self.done():
            self.pending = None
            self.set_exception(error)


class _Group:
    """Searches with equal numbers of rows per input and of draft tokens per step, which share a cache.

    The input in slot s has the rows s * rows_per_input, ... of the cache. Slots of inputs that have ended are free: if
    further searches may come, they get those, and there are 1, 2, 4, 8, ... slots, so that few shapes need a program.

    Args:
        searches: New searches.
        steps: Steps after their prefixes.
        logits: Logits of the next token of each input.
        has_free_slots: Whether to keep free slots.
    """

    def __init__(
        self, searches: Sequence[Search], steps: DecodingSteps, logits: Array, *, has_free_slots: bool
    ) -> None:
        self.searches, self.steps, self._has_free_slots = list(searches), steps, False
        self.num_slots, self._rows_per_input = 0, searches[0].batch.rows_per_input
        self._ahead: Iterator[Any] | None = None  # the steps that the device makes by itself
        for search in self.searches:
            first, self.num_slots = self.num_slots, self.num_slots + len(search.batch.inputs)
            search.slots = np.arange(first, self.num_slots)
        self._advance(logits, 1)
        self._has_free_slots = has_free_slots

    def step(self) -> None:
        """Extend all rows by one token, and by draft tokens if a search has any."""
        batch, count = self.searches[0].batch, self._rows_per_input
        pairs = next(self._ahead or iter(()), None)
        if pairs is None:  # others may follow with a larger cache
            self._ahead = self._look_ahead()
            pairs = next(self._ahead, None)
        if pairs is not None:
            self._advance(pairs, count)
            return
        self._ahead = None
        width = 1 + max(len(search.pending.draft_tokens) for search in self.searches)
        # All draft tokens or none, so that there are programs for two numbers of tokens.
        width = 1 if width == 1 else 1 + batch.num_draft_tokens
        tokens = np.zeros((self.num_slots * count, width), dtype=np.int64)
        for search in self.searches:
            rows, (following, _, draft_tokens, _) = _rows(search.slots, count), search.pending
            tokens[rows, 0] = following.tokens[:, -1]
            tokens[rows[:1], 1 : 1 + len(draft_tokens)] = draft_tokens
        logits = self.steps.step(batch.to_device(tokens), all_logits=batch.num_draft_tokens > 0)
        self._advance(logits, count, width)

    def _look_ahead(self) -> Iterator[Any]:
        """Return the steps that need no host, if the only search can say now what decides about its tokens."""
        (search, *others), choices = self.searches, None
        has_all_rows = not others and not self._has_free_slots and len(search.slots) == self.num_slots
        if self.steps.can_look_ahead and has_all_rows and search.algorithm is greedy_or_sample:
            choices = search.batch.look_ahead(search.pending.rows)
        return iter(()) if choices is None else self.steps.look_ahead(*choices)

    def add(self, other: _Group) -> None:
        """Put the searches of another group into free slots."""
        used = {slot for search in self.searches for slot in search.slots.tolist()}
        if len(used) + other.num_slots > self.num_slots:
            self._resize(_power_of_two(len(used) + other.num_slots), np.arange(self.num_slots * self._rows_per_input))
            used = set(range(len(used)))
        free = np.asarray([slot for slot in range(self.num_slots) if slot not in used][: other.num_slots])
        self.steps.put(_rows(free, self._rows_per_input).tolist(), free.tolist(), other.steps)
        for search in other.searches:
            search.slots = free[search.slots]
        self.searches += other.searches

    def reserve(self) -> None:
        """Add free slots up to a power of two, if the group keeps free slots."""
        size = _power_of_two(self.num_slots)
        if self._has_free_slots and size > self.num_slots:
            self._resize(size, np.arange(self.num_slots * self._rows_per_input))

    def _advance(self, logits: Array, rows_before: int, width: int = 1) -> None:
        """Give the searches their logits, and move the rows of the cache as they require.

        Args:
            logits: Logits of all rows, or pairs of their tokens and log-probabilities that were chosen ahead,
                (steps, rows, 2).
            rows_before: Number of rows of each input.
            width: Number of new tokens of each row.
        """
        for search in self.searches:
            rows = _rows(search.slots, rows_before)
            search.advance(Chosen.of(logits[:, rows]) if self._ahead else _take(logits, rows))
        _answer(self.searches)
        self.searches, num_before = [search for search in self.searches if not search.done()], len(self.searches)
        if 0 < len(self.searches) < num_before and not self._ahead:
            self.steps.cut_memory(max(search.batch.source_length for search in self.searches))
        if width > 1:
            dropped = np.full(self.num_slots, width)
            for search in self.searches:
                dropped[search.slots] -= search.pending.kept
            self.steps.drop(dropped)
        count, num_used = self._rows_per_input, 0
        parents = np.full(self.num_slots * count, -1)
        for search in self.searches:
            slots, (following, inputs, *_) = search.slots, search.pending
            search.slots = slots if inputs is None else slots[inputs]
            parents[_rows(search.slots, count)] = _rows(slots, rows_before)[following.parents]
            num_used += len(search.slots)
        size = num_used
        if self._ahead and num_used:  # rows move when the device has made its steps
            size = self.num_slots
        elif self._has_free_slots:
            size = self.num_slots if 4 * num_used > self.num_slots else self.num_slots // 2
        if not num_used:
            self.steps.close()
        elif size != self.num_slots or rows_before != count:
            self._resize(size, parents)
        else:
            same = np.arange(len(parents))
            if num_used < size:
                self.steps.release(parents < 0)
                parents = np.where(parents < 0, same, parents)
            if (parents != same).any():
                self.steps.reorder(parents.tolist())

    def _resize(self, size: int, parents: Any) -> None:
        """Change the number of slots to `size`, the first of which are used; rows continue their parents."""
        count, used = self._rows_per_input, np.concatenate([search.slots for search in self.searches])
        order = np.concatenate([used, np.repeat(used[:1], size - len(used))])
        is_same = np.array_equal(order, np.arange(self.num_slots))
        self.steps.reorder(parents[_rows(order, count)].tolist(), None if is_same else order.tolist())
        self.steps.release(slice(len(used) * count, size * count))
        first = 0
        for search in self.searches:
            first, start = first + len(search.slots), first
            search.slots = np.arange(start, first)
        self.num_slots = size


def _answer(searches: Sequence[Search]) -> None:
    """Choose tokens until no search asks for one; those with equal settings by the same calls."""
    while waiting := [search for search in searches if isinstance(search.pending, SampleRequest)]:
        alike: dict[Any, list[Search]] = {}
        for search in waiting:
            alike.setdefault(search.pending.key, []).append(search)
        for group in alike.values():
            try:
                chosen = choose([search.pending for search in group])
            except Exception as error:  # noqa: BLE001 - searches with other settings must go on
                for search in group:
                    search.fail(error)
                continue
            start = 0
            for search in group:
                rows = slice(start, start + search.pending.logits.shape[0])
                start = rows.stop
                search.advance(Chosen(chosen.tokens[rows], chosen.log_probs[rows]))


def _rows(slots: Any, count: int) -> Any:
    """Return the rows of slots, `count` each."""
    return slots if count == 1 else (slots[:, None] * count + np.arange(count)).ravel()


def _take(logits: Array, rows: Any) -> Array:
    """Return some rows of logits, in ascending order."""
    first, last = int(rows[0]), int(rows[-1]) + 1
    if last - first == len(rows):
        return logits if len(rows) == logits.shape[0] else logits[first:last, ...]
    xp = array_namespace(logits)
    return xp.take(logits, xp.from_host(rows, dtype="int64", device=device(logits)), axis=0)


def _power_of_two(count: int) -> int:
    return 1 << (count - 1).bit_length()


class Engine:
    """Runs searches of one model together, in one thread.

    Args:
        is_shared: Whether further searches may begin while others run.
    """

    def __init__(self, *, is_shared: bool = False) -> None:
        self._is_shared = is_shared
        self._groups: dict[tuple[int, int], _Group] = {}  # by the numbers of rows for each input and of draft tokens

    def add(self, searches: Sequence[Search]) -> None:
        """Read the prefixes of searches, those with similar lengths together, and let them join the next step."""
        alike: dict[Any, list[Search]] = {}
        for search in searches:
            batch = search.batch
            prompt = batch.prefixes[batch.inputs[0]]
            key = tuple(prompt) if batch.uses_prefix_cache else batch.source_length.bit_length()
            alike.setdefault((batch.rows_per_input, batch.num_draft_tokens, key), []).append(search)
        for (*sizes, _), each in alike.items():
            self._add(tuple(sizes), each)

    def _add(self, sizes: tuple[int, int], searches: Sequence[Search]) -> None:
        try:
            prefilled = prefill([search.batch for search in searches])
        except Exception as error:  # noqa: BLE001 - the other searches must go on
            for search in searches if len(searches) > 1 else ():
                self._add(sizes, [search])
            if len(searches) == 1:
                searches[0].fail(error)
            return
        group = _Group(searches, *prefilled, has_free_slots=self._is_shared)
        if not group.searches:
            return
        if sizes in self._groups:
            self._groups[sizes].add(group)
        else:
            self._groups[sizes] = group
            group.reserve()

    def step(self) -> None:
        """Extend all searches by one token."""
        for sizes, group in list(self._groups.items()):
            group.step()
            if not group.searches:
                del self._groups[sizes]

    @property
    def is_idle(self) -> bool:
        """True if no search runs."""
        return not self._groups

    def close(self, error: BaseException | None = None) -> None:
        """End all searches, and keep their programs for others."""
        for group in self._groups.values():
            group.steps.close()
            for search in group.searches:
                search.fail(error)
        self._groups.clear()


Result = TypeVar("Result")
Task = Generator[Sequence[Search], None, Result]
"""A generator that yields searches, continues when all of them have ended, and returns a result.

Tasks need no threads: an engine may run the searches of many of them.
"""


def run_steps(task: Task[Result]) -> Generator[None, None, Result]:
    """Run the searches of a task in a new engine, yielding after each step; return the result of the task."""
    engine = Engine()
    with contextlib.closing(engine):
        while True:
            try:
                searches = next(task)
            except StopIteration as end:
                return end.value
            engine.add(searches)
            yield
            while not engine.is_idle:
                engine.step()
                yield


def run_task(task: Task[Result]) -> Result:
    """Run a task to its end and return its result."""
    steps = run_steps(task)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value
