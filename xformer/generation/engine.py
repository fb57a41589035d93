"""The loop of generation: every step extends the rows of all searches by one token.

A search is a generator: it receives the logits of its rows, and yields a `Move`, the next token of each row. Greedy
search, sampling and beam search differ in nothing else. Searches may begin and end at any step, and their rows may have
any lengths.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

from xformer.backends import Array, index_dtype
from xformer.generation.batch import GenerationBatch
from xformer.generation.decoding_steps import DecodingSteps


class Move(NamedTuple):
    """The next step of a search.

    Attributes:
        tokens: Next token of each row.
        parents: Row of the step before that each row continues; None: the same rows.
        inputs: Inputs that remain; None: all.
    """

    tokens: list[int]
    parents: Sequence[int] | None = None
    inputs: Sequence[int] | None = None


Algorithm = Callable[[GenerationBatch, Array], Generator[Move, Array, Any]]
"""Function of a batch and the first logits, (inputs, vocabulary), that makes the generator of a search."""


class Search:
    """A search in an engine.

    Args:
        batch: Its inputs.
        algorithm: Makes its generator.

    Attributes:
        move: Its next step, or None if it has ended.
    """

    def __init__(self, batch: GenerationBatch, algorithm: Algorithm) -> None:
        self.batch, self.algorithm = batch, algorithm
        self.move: Move | None = None
        self.is_done = False
        self.num_rows = self.num_inputs = batch.num_inputs
        self._generator: Any = None
        self._result: Any = None
        self._error: Exception | None = None

    @property
    def result(self) -> Any:
        """Result of the algorithm; its error is raised."""
        if self._error is not None:
            raise self._error
        return self._result

    def begin(self) -> DecodingSteps:
        """Read the prefixes and choose the first tokens; return the steps of the rows."""
        steps, logits = self.batch.prefill()
        self._generator = self.algorithm(self.batch, logits)
        self.advance(None)
        return steps

    def advance(self, logits: Array | None) -> None:
        """Continue with the logits of the rows; an error ends this search only."""
        try:
            self.move = next(self._generator) if logits is None else self._generator.send(logits)
        except StopIteration as end:
            self.end(end.value)
        except Exception as error:  # noqa: BLE001 - `result` raises it
            self.end(error=error)

    def end(self, result: Any = None, error: Exception | None = None) -> None:
        """End the search."""
        self.move, self._result, self._error, self.is_done = None, result, error, True


class _Group:
    """Searches that share a cache: they have as many rows for each input."""

    def __init__(self, search: Search, steps: DecodingSteps) -> None:
        self.searches, self.steps = [search], steps

    def step(self) -> None:
        """Extend all rows by one token."""
        first = self.searches[0].batch
        moves = [search.move for search in self.searches]
        tokens = [[token] for move in moves if move is not None for token in move.tokens]
        logits, start = self.steps.step(first.to_device(tokens, index_dtype(first.xp))), 0
        for search in self.searches:
            rows = logits if search.num_rows == len(tokens) else logits[start : start + search.num_rows, :]
            start += search.num_rows
            search.advance(rows)
        self.arrange()

    def arrange(self) -> None:
        """Move the rows of the cache as the searches require, and drop searches that have ended."""
        parents: list[int] = []
        inputs: list[int] = []
        num_rows = num_inputs = 0
        for search in self.searches:
            rows, sentences = range(search.num_rows), range(search.num_inputs)
            if (move := search.move) is not None:
                parents += [num_rows + row for row in (rows if move.parents is None else move.parents)]
                inputs += [num_inputs + index for index in (sentences if move.inputs is None else move.inputs)]
                search.num_rows = len(move.tokens)
                search.num_inputs = len(sentences if move.inputs is None else move.inputs)
            num_rows, num_inputs = num_rows + len(rows), num_inputs + len(sentences)
        self.searches = [search for search in self.searches if not search.is_done]
        if not self.searches:
            self.steps.close()
        elif parents != list(range(num_rows)) or len(inputs) < num_inputs:
            self.steps.reorder(parents, inputs if len(inputs) < num_inputs else None)


class Engine:
    """Runs searches of one model; those that several threads run at the same time share their steps."""

    def __init__(self) -> None:
        self._groups: dict[int, _Group] = {}
        self._waiting: list[Search] = []
        self._condition = threading.Condition()
        self._has_leader = False

    def add(self, search: Search) -> None:
        """Read the prefixes of a search and let it join the next step."""
        steps = search.begin()
        group = _Group(search, steps)
        group.arrange()
        if search.is_done:
            return
        rows_per_input = search.num_rows // search.num_inputs
        if rows_per_input in self._groups:
            self._groups[rows_per_input].searches.append(search)
            self._groups[rows_per_input].steps.extend(steps)
        else:
            self._groups[rows_per_input] = group

    def step(self) -> None:
        """Extend all searches by one token."""
        for rows_per_input, group in list(self._groups.items()):
            group.step()
            if not group.searches:
                del self._groups[rows_per_input]

    def run(self, search: Search) -> Any:
        """Run a search to its end, together with those of other threads; return its result.

        One thread makes the steps for all: when its own search has ended, another takes over.
        """
        with self._condition:
            self._waiting.append(search)
            self._condition.wait_for(lambda: search.is_done or not self._has_leader)
            if search.is_done:
                return search.result
            self._has_leader = True
        try:
            while not search.is_done:
                self._step_all()
        except BaseException:
            self.close()
            raise
        finally:
            with self._condition:
                self._has_leader = False
                self._condition.notify_all()
        return search.result

    def close(self) -> None:
        """End all searches, and keep their programs for others."""
        for group in self._groups.values():
            group.steps.close()
            for search in group.searches:
                search.end(error=RuntimeError("the engine was closed during the search"))
        self._groups.clear()

    def _step_all(self) -> None:
        with self._condition:
            waiting, self._waiting = self._waiting, []
        for search in waiting:
            try:
                self.add(search)
            except Exception as error:  # noqa: BLE001 - an invalid search must not end the others
                search.end(error=error)
        running = [search for group in self._groups.values() for search in group.searches]
        self.step()
        if any(search.is_done for search in (*waiting, *running)):
            with self._condition:
                self._condition.notify_all()


_SHARED: ContextVar[Engine | None] = ContextVar("shared_engine", default=None)


@contextlib.contextmanager
def shared_engine(engine: Engine) -> Iterator[None]:
    """Let searches inside the block, in this thread, run in an engine that other threads use, too."""
    token = _SHARED.set(engine)
    try:
        yield
    finally:
        _SHARED.reset(token)


def run_search(batch: GenerationBatch, algorithm: Algorithm) -> Any:
    """Run a search in the shared engine of the thread, or in a new one."""
    return (_SHARED.get() or Engine()).run(Search(batch, algorithm))
