"""The loop of generation: every step extends the rows of all searches by one token, or by several draft tokens.

A search is a generator: it receives the logits of its rows, may yield a `Choice` to have a token of each row chosen,
and yields a `Move` with the next tokens. Greedy search, sampling, beam search and assisted search are such generators.
Searches may begin and end at any step, and their rows may have any lengths.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Sequence
from typing import Any, TypeVar

from xformer.backends import Array, array_namespace, device, from_host, index_dtype
from xformer.generation.batch import Choice, GenerationBatch, Move, prefill
from xformer.generation.sampling import choose
from xformer.generation.steps import DecodingSteps

Algorithm = Callable[[GenerationBatch, Array], Generator[Move | Choice, Any, Any]]
"""Function of a batch and the first logits, (inputs, vocabulary), that makes the generator of a search."""


class Search:
    """A search in an engine.

    Args:
        batch: Its inputs.
        algorithm: Makes its generator.

    Attributes:
        request: A `Choice`, then its next `Move`; None if it has ended.
        places: Place of each of its inputs in the cache.
    """

    def __init__(self, batch: GenerationBatch, algorithm: Algorithm) -> None:
        self.batch, self.algorithm = batch, algorithm
        self.request: Any = None
        self.is_done = False
        self.places: list[int] = []
        self._generator: Any = None
        self._result: Any = None
        self._error: BaseException | None = None

    @property
    def result(self) -> Any:
        """Result of the algorithm; its error is raised."""
        if self._error is not None:
            raise self._error
        return self._result

    def advance(self, answer: Any) -> None:
        """Continue with the logits of the rows or the result of a choice; an error ends this search only."""
        if self.is_done:
            return
        try:
            if self._generator is None:
                self._generator = self.algorithm(self.batch, answer)
                self.request = next(self._generator)
            else:
                self.request = self._generator.send(answer)
        except StopIteration as end:
            self.end(end.value)
        except Exception as error:  # noqa: BLE001 - `result` raises it
            self.end(error=error)

    def end(self, result: Any = None, error: BaseException | None = None) -> None:
        """End the search, unless it has ended."""
        if self.is_done:
            return
        self.request, self._result, self._error, self.is_done = None, result, error, True


class _Group:
    """Searches with equal numbers of rows per input and of draft tokens per step, which share a cache.

    The input at place p has the rows p * rows_per_input, ... of the cache. Places of inputs that have ended are free:
    if further searches may come, they get those, and there are 1, 2, 4, 8, ... places, so that few shapes need a
    program.

    Args:
        searches: New searches.
        steps: Steps after their prefixes.
        logits: Logits of the next token of each input.
        has_free_places: Whether to keep free places.
    """

    def __init__(
        self, searches: Sequence[Search], steps: DecodingSteps, logits: Array, *, has_free_places: bool
    ) -> None:
        self.searches, self.steps, self._has_free_places = list(searches), steps, False
        self.num_places, self._rows = 0, searches[0].batch.rows_per_input
        for search in self.searches:
            first, self.num_places = self.num_places, self.num_places + search.batch.num_inputs
            search.places = list(range(first, self.num_places))
            search.advance(_rows_of(logits, search.places))
        _make_choices(self.searches)
        self._arrange(rows_before=1)
        self._has_free_places = has_free_places

    def step(self) -> None:
        """Extend all rows by one token, and by draft tokens if a search has any."""
        batch, count, has_draft = self.searches[0].batch, self._rows, False
        tokens = [[0] * (1 + batch.num_draft_tokens) for _ in range(self.num_places * count)]
        for search in self.searches:
            move, has_draft = search.request, has_draft or bool(search.request.draft_tokens)
            for index, token in enumerate(move.tokens):
                row = tokens[search.places[index // count] * count + index % count]
                row[: 1 + len(move.draft_tokens)] = [token, *move.draft_tokens]
        width = len(tokens[0]) if has_draft else 1
        ids = batch.to_device([row[:width] for row in tokens], index_dtype(batch.xp))
        logits = self.steps.step(ids, all_logits=batch.new_drafter is not None)
        for search in self.searches:
            search.advance(_rows_of(logits, [place * count + row for place in search.places for row in range(count)]))
        _make_choices(self.searches)
        if width > 1:
            kept = {search.places[0]: search.request.kept for search in self.searches if not search.is_done}
            self.steps.drop([width - kept.get(place, 0) for place in range(self.num_places)])
        self._arrange(rows_before=count)

    def add(self, other: _Group) -> None:
        """Put the searches of another group into free places."""
        used = {place for search in self.searches for place in search.places}
        if len(used) + other.num_places > self.num_places:
            self._resize(_power_of_two(len(used) + other.num_places), {})
            used = set(range(len(used)))
        free = [place for place in range(self.num_places) if place not in used][: other.num_places]
        rows = [place * self._rows + row for place in free for row in range(self._rows)]
        self.steps.put(rows, free, other.steps)
        for search in other.searches:
            search.places = [free[place] for place in search.places]
        self.searches += other.searches

    def reserve(self) -> None:
        """Add free places up to a power of two, if the group keeps free places."""
        size = _power_of_two(self.num_places)
        if self._has_free_places and size > self.num_places:
            self._resize(size, {})

    def _arrange(self, rows_before: int) -> None:
        """Move the rows of the cache as the searches require, and free the places of inputs that have ended."""
        count, parents = self._rows, {}
        self.searches = [search for search in self.searches if not search.is_done]
        for search in self.searches:
            move, places = search.request, search.places
            search.places = places if move.inputs is None else [places[index] for index in move.inputs]
            for row, parent in enumerate(range(len(move.tokens)) if move.parents is None else move.parents):
                source = places[parent // rows_before] * rows_before + parent % rows_before
                parents[search.places[row // count] * count + row % count] = source
        size = sum(len(search.places) for search in self.searches)
        if not size:
            self.steps.close()
            return
        if self._has_free_places:
            size = self.num_places if 4 * size > self.num_places else self.num_places // 2
        if size != self.num_places or rows_before != count:
            self._resize(size, parents)
            return
        rows = [parents.get(row, row) for row in range(size * count)]
        if rows != list(range(size * count)):
            self.steps.reorder(rows)
        self.steps.release([row for row in range(size * count) if row not in parents])

    def _resize(self, size: int, parents: dict[int, int]) -> None:
        """Change the number of places to `size`, the first of which are used; rows continue their parents."""
        count, used = self._rows, [place for search in self.searches for place in search.places]
        order = [*used, *[used[0]] * (size - len(used))]
        rows = [parents.get(place * count + row, place * count + row) for place in order for row in range(count)]
        self.steps.reorder(rows, None if order == list(range(self.num_places)) else order)
        self.steps.release(range(len(used) * count, size * count))
        first = 0
        for search in self.searches:
            first, start = first + len(search.places), first
            search.places = list(range(start, first))
        self.num_places = size


def _make_choices(searches: Sequence[Search]) -> None:
    """Choose tokens until no search asks for one; those with equal settings by the same calls."""
    while waiting := [search for search in searches if isinstance(search.request, Choice)]:
        groups: dict[Any, list[tuple[Search, Choice]]] = {}
        for search in waiting:
            groups.setdefault(search.request.key, []).append((search, search.request))
        for group in groups.values():
            choices = [choice for _, choice in group]
            try:
                tokens, log_probs = choose(choices)
            except Exception as error:  # noqa: BLE001 - searches with other settings must go on
                for search, _ in group:
                    search.end(error=error)
                continue
            start = 0
            for search, choice in group:
                rows = slice(start, start + choice.logits.shape[0])
                start = rows.stop
                search.advance((tokens[rows], log_probs[rows]))


def _rows_of(logits: Array, rows: list[int]) -> Array:
    """Return some rows of logits."""
    if rows == list(range(rows[0], rows[0] + len(rows))):
        return logits if len(rows) == logits.shape[0] else logits[rows[0] : rows[0] + len(rows), ...]
    xp = array_namespace(logits)
    return xp.take(logits, from_host(xp, rows, dtype="int64", device=device(logits)), axis=0)


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
                searches[0].end(error=error)
            return
        group = _Group(searches, *prefilled, has_free_places=self._is_shared)
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
                search.end(error=error)
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
