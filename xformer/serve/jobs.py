"""Jobs and the worker of a model: one thread that runs all searches in one engine, and one for other jobs."""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

from xformer.errors import BackendError, MissingPackageError, XformerError, abbreviate
from xformer.generation.engine import Engine, Search

_MAX_TEXTS = 64  # that are joined


class Event(NamedTuple):
    """An event of a job: its name ("text", "result", "error", ...) and its data."""

    name: str
    data: Any


class JobError(Exception):
    """An error that a client receives.

    Args:
        message: One line; a long one is shortened.
        status: HTTP status.
        code: Short name, or None.
        param: Field of the request, or None.
    """

    def __init__(self, message: str, status: int = 400, code: str | None = None, param: str | None = None) -> None:
        super().__init__(abbreviate(message))
        self.status, self.code, self.param = status, code, param


def stopping() -> JobError:
    """Return the error of jobs that the worker does not begin or finish any more."""
    return JobError("the server is stopping", 503, "stopping")


def too_long(message: str, param: str | None = None) -> JobError:
    """Return the error of texts that do not fit into the context of a model, with the code of OpenAI."""
    return JobError(message, 400, "context_length_exceeded", param)


def timed_out() -> JobError:
    """Return the error of requests that took longer than the server allows."""
    return JobError("the request took too long; ask for less at a time: fewer texts, tokens or beams", 504, "timeout")


class Job:
    """A search for a request.

    Args:
        timeout: Seconds until the job is stopped.
        is_alone: Whether it shares no steps with others. Sums may depend on the number of rows.

    Attributes:
        task: What the worker runs, a `Task` for `Worker.submit`.
        engine: The engine that runs its searches.
        searches: The searches that the task waits for.
    """

    engine: Engine
    searches: Sequence[Search] = ()

    def __init__(self, timeout: float = 120.0, *, is_alone: bool = False) -> None:
        self.task: Any = iter(())
        self.is_alone, self._deadline = is_alone, time.monotonic() + timeout
        self._error: JobError | None = None
        self._outbox: list[Event] = []
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()

    def cancel(self) -> None:
        """Stop the job at the next token."""
        self._error = stopping()

    def check(self, tokens: Any = None, lengths: Any = None) -> list[bool]:
        """Raise JobError after `cancel` or the timeout; a stopping criterion that ends no row otherwise."""
        if self._error is None and time.monotonic() > self._deadline:
            self._error = timed_out()
        if self._error is not None:
            raise self._error
        return [] if lengths is None else [False] * lengths.shape[0]

    def emit(self, name: str, data: Any) -> None:
        """Send an event at the end of the step; the last one is "result" or "error"."""
        self._outbox.append(Event(name, data))

    def flush(self) -> None:
        """Send the events to the loop of the client."""
        events, self._outbox = self._outbox, []
        if not events:
            return
        try:
            self._loop.call_soon_threadsafe(self._receive, events)
        except RuntimeError:  # the loop is closed: the server has stopped
            self.cancel()

    def _receive(self, events: list[Event]) -> None:
        for event in events:
            self._events.put_nowait(event)

    async def events(self) -> AsyncIterator[Event]:
        """Yield all events; raise JobError for an error. The job is cancelled if its client stops listening."""
        try:
            while True:
                event = await self._events.get()
                if event.name == "error":
                    raise event.data
                yield event
                if event.name == "result":
                    return
        finally:
            self.cancel()

    async def result(self) -> Any:
        """Wait for the result; raise JobError for an error."""
        *_, last = [event async for event in self.events()]
        return last.data


def public_error(error: Exception) -> JobError:
    """Return the error for the client; an unexpected one is logged, and the client receives a general message."""
    if isinstance(error, JobError):
        return error
    if isinstance(error, MissingPackageError):
        return JobError(str(error), 501)
    if isinstance(error, XformerError) and not isinstance(error, BackendError):  # of the server, not of the request
        return JobError(str(error), 400)
    logging.getLogger("xformer").error("a request failed", exc_info=error)
    return JobError("internal error; the log of the server has details", 500)


class Worker:
    """Runs the jobs of one model.

    All searches run in one thread and share an engine, so each of its steps extends the outputs of all by one token; a
    search begins as soon as fewer than `max_batch` others run. Another thread makes other computations, one at a time.

    Args:
        name: Name of the threads.
        max_batch: Maximum number of searches at a time.
    """

    def __init__(self, name: str, *, max_batch: int = 32) -> None:
        self.max_batch = max_batch
        self._waiting: deque[Job] = deque()
        self._running: list[Job] = []
        self._condition = threading.Condition()
        self._is_closed = False
        self._engine = Engine(is_shared=True)
        self._texts: deque[tuple[list[Any], Future[Any]]] = deque()  # of calls of `join`, and their results
        self._num_computing = 0
        self._computing = ThreadPoolExecutor(1, f"{name} computing")
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    @property
    def num_running(self) -> int:
        """Number of jobs that are running."""
        return len(self._running) + self._num_computing

    @property
    def num_waiting(self) -> int:
        """Number of jobs that have not begun."""
        return len(self._waiting)

    def submit(self, job: Job) -> None:
        """Append a job to the queue."""
        with self._condition:
            if self._is_closed:
                raise stopping()
            self._waiting.append(job)
            self._condition.notify_all()

    async def compute(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Return the result of a function, in the thread for other computations."""
        self._num_computing += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._computing, function, *arguments)
        except RuntimeError as error:  # of a closed executor
            raise stopping() if self._is_closed else error from error
        finally:
            self._num_computing -= 1

    def start(self, job: Job, function: Callable[[Job], Any]) -> None:
        """Run function(job) in the thread for other computations; the job ends with its result or its error."""

        async def run() -> None:
            try:
                job.emit("result", await self.compute(function, job))
            except Exception as error:  # noqa: BLE001 - the client receives it
                job.emit("error", public_error(error))
            job.flush()

        job.task = asyncio.ensure_future(run())

    async def join(self, function: Callable[[list[Any]], Sequence[Any]], texts: list[Any]) -> list[Any]:
        """Return function(texts), which has a result for each text or pair; those of several calls are joined."""
        results: list[Any] = []
        for start in range(0, len(texts), _MAX_TEXTS):  # so that a long list does not hold the others
            result: Future[Any] = Future()
            self._texts.append((texts[start : start + _MAX_TEXTS], result))
            try:
                await self.compute(self._join, function)
                results += await asyncio.wrap_future(result)
            finally:
                result.cancel()  # if the client has disconnected
        return results

    def _join(self, function: Callable[[list[Any]], Sequence[Any]]) -> None:
        """Run a function with the texts that wait, if no earlier call has done so.

        Texts whose client has gone are skipped: they would take the place of those of this call, which has no other.
        """
        batch: list[tuple[list[Any], Future[Any]]] = []
        while self._texts and sum(len(texts) for texts, _ in [*batch, self._texts[0]]) <= _MAX_TEXTS:
            texts, result = self._texts.popleft()
            if result.set_running_or_notify_cancel():
                batch.append((texts, result))
        if not batch:
            return
        try:
            results = iter(function([text for texts, _ in batch for text in texts]))
            for texts, result in batch:
                result.set_result([*itertools.islice(results, len(texts))])
        except Exception as error:  # noqa: BLE001 - each client receives it
            for _, result in batch:
                result.set_exception(public_error(error))

    def close(self, timeout: float = 10.0) -> None:
        """Refuse further jobs, and wait for those that run; after the timeout they fail."""
        with self._condition:
            self._is_closed = True
            for job in self._waiting:
                job.emit("error", stopping())
                job.flush()
            self._waiting.clear()
            self._condition.notify_all()
        self._thread.join(timeout)
        for job in list(self._running):
            job.cancel()
        self._thread.join(timeout)
        self._computing.shutdown(wait=False, cancel_futures=True)

    def _work(self) -> None:
        while (new := self._next_jobs()) is not None:
            self._running += new
            self._resume(new)
            for engine in dict.fromkeys(job.engine for job in self._running):
                try:
                    engine.step()
                except Exception as error:  # noqa: BLE001 - jobs must not end the thread
                    engine.close(error)
            self._resume([each for each in self._running if all(search.done() for search in each.searches)])
            for job in [*new, *self._running]:
                job.flush()

    def _next_jobs(self) -> list[Job] | None:
        """Return the jobs that may begin now; wait for one if none runs. None: the worker is closed."""
        with self._condition:
            if not self._running:
                self._condition.wait_for(lambda: self._is_closed or self._waiting)
                if self._is_closed:
                    return None
            count = min(len(self._waiting), self.max_batch - len(self._running))
            jobs = [self._waiting.popleft() for _ in range(count)]
        for job in jobs:
            job.engine = Engine() if job.is_alone else self._engine
        return jobs

    def _resume(self, ended: Sequence[Job]) -> None:
        """Continue tasks whose searches have ended, and begin their next searches together."""
        searches: dict[Engine, list[Search]] = {}
        for job in ended:
            try:
                job.check()
                job.searches = next(job.task)
                searches.setdefault(job.engine, []).extend(job.searches)
                continue
            except StopIteration as end:
                job.emit("result", end.value)
            except Exception as error:  # noqa: BLE001 - a request must not end the thread
                job.emit("error", public_error(error))
            job.flush()
            self._running.remove(job)
        for engine, new in searches.items():
            try:
                engine.add(new)
            except Exception as error:  # noqa: BLE001 - as above
                for search in new:
                    search.fail(error)
