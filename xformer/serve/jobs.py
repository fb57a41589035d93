"""Jobs and the worker that runs those of a model: searches together in one engine, other jobs in joined batches."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from xformer.errors import XformerError
from xformer.generation.engine import Engine, shared_engine

Run = Callable[[Sequence["Job"]], None]
"""Function that runs jobs with equal keys, and calls `Job.emit` with their events and results."""


class Event(NamedTuple):
    """An event of a job: its name ("token", "result", "error", ...) and its data."""

    name: str
    data: Any


class JobError(Exception):
    """An error that a client receives.

    Args:
        message: One line.
        status: HTTP status.
        code: Short name, or None.
    """

    def __init__(self, message: str, status: int = 400, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code = status, code


class Job:
    """A request to a model.

    Args:
        run: Function that runs a batch of jobs.
        request: Data of this job for `run`.
        key: Jobs with equal functions and keys may be joined into a batch; None: the job runs alone.
        is_search: Whether the job generates text, together with other searches.
        timeout: Seconds until the job is stopped.
    """

    def __init__(
        self, run: Run, request: Any, *, key: Hashable = None, is_search: bool = False, timeout: float = 120.0
    ) -> None:
        self.run, self.request, self.key, self.is_search = run, request, key, is_search
        self.deadline = time.monotonic() + timeout
        self.is_cancelled = False
        self.has_emitted = False
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()

    @property
    def is_stopped(self) -> bool:
        """True after `cancel` or the timeout; generation stops at the next token."""
        return self.is_cancelled or time.monotonic() > self.deadline

    def cancel(self) -> None:
        """Stop the job, e.g. because its client has disconnected."""
        self.is_cancelled = True

    def emit(self, name: str, data: Any) -> None:
        """Send an event to the client; called in any thread. The last event is "result" or "error"."""
        self.has_emitted = True
        try:
            self._loop.call_soon_threadsafe(self._events.put_nowait, Event(name, data))
        except RuntimeError:  # the loop is closed: the server has stopped
            self.is_cancelled = True

    def finish(self, data: Any) -> None:
        """Send the result, or an error if the job was stopped."""
        if self.is_stopped:
            self.fail(JobError("the request took too long; ask for fewer tokens or beams", 504, "timeout"))
        else:
            self.emit("result", data)

    def fail(self, error: Exception) -> None:
        """Send an error; an unexpected one is logged, and the client receives a general message."""
        if isinstance(error, XformerError):
            error = JobError(str(error))
        elif not isinstance(error, JobError):
            logging.getLogger("xformer").error("a request failed", exc_info=error)
            error = JobError("internal error; the log of the server has details", 500)
        self.emit("error", error)

    async def next_event(self) -> Event:
        """Wait for the next event; raise JobError if it is an error."""
        event = await self._events.get()
        if event.name == "error":
            raise event.data
        return event


class Worker:
    """The threads that run the jobs of one model.

    Each search runs in its own thread. All searches share an engine, so each of its steps extends the outputs of all by
    one token; a search begins as soon as fewer than `max_batch` others run. One thread starts them, and runs the other
    jobs itself, in the order of their arrival.

    Args:
        name: Name of the threads.
        max_batch: Maximum number of searches at a time, and of other jobs that are joined.
        wait: Seconds to wait for further jobs with the key of the next one.
    """

    def __init__(self, name: str, *, max_batch: int = 32, wait: float = 0.003) -> None:
        self.max_batch, self.wait = max_batch, wait
        self._running: list[Job] = []
        self._jobs: deque[Job] = deque()
        self._condition = threading.Condition()
        self._is_closed = False
        self._engine = Engine(is_shared=True)
        self._searches = ThreadPoolExecutor(max_batch, thread_name_prefix=name)
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    @property
    def num_running(self) -> int:
        """Number of jobs that are running."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Number of jobs that have not begun."""
        return len(self._jobs)

    def submit(self, job: Job) -> None:
        """Append a job to the queue."""
        with self._condition:
            if self._is_closed:
                raise _stopping()
            self._jobs.append(job)
            self._condition.notify_all()

    def close(self, timeout: float = 10.0) -> None:
        """Stop all jobs and wait for the thread to end."""
        with self._condition:
            self._is_closed = True
            for job in [*self._jobs, *self._running]:
                job.cancel()
            self._condition.notify_all()
        self._thread.join(timeout)
        self._searches.shutdown(wait=False)

    def _work(self) -> None:
        while (batch := self._next_batch()) is not None:
            if batch[0].is_search:
                self._searches.submit(self._run_batch, batch)
            else:
                self._run_batch(batch)

    def _next_batch(self) -> list[Job] | None:
        with self._condition:
            while True:
                self._condition.wait_for(lambda: self._is_closed or self._next_job() is not None)
                if self._is_closed:
                    for job in self._jobs:
                        job.fail(_stopping())
                    return None
                first = self._next_job()
                if first is None:
                    continue
                if first.key is not None and self.wait:
                    end = time.monotonic() + self.wait
                    while len(self._jobs) < self.max_batch and (left := end - time.monotonic()) > 0:
                        self._condition.wait(left)
                fits = [job for job in self._jobs if job is first or (job.key is not None and _equal(job, first))]
                batch = fits[: self.max_batch]
                chosen = set(map(id, batch))
                self._jobs = deque(job for job in self._jobs if id(job) not in chosen)
                live = []
                for job in batch:
                    if job.is_stopped:
                        job.finish(None)
                    else:
                        live.append(job)
                if live:
                    self._running += live
                    return live

    def _next_job(self) -> Job | None:
        """Return the first job that may begin now."""
        has_space = sum(job.is_search for job in self._running) < self.max_batch
        return next((job for job in self._jobs if has_space or not job.is_search), None)

    def _run_batch(self, batch: list[Job]) -> None:
        try:
            with shared_engine(self._engine):
                self._run(batch)
        finally:
            with self._condition:
                self._running = [job for job in self._running if job not in batch]
                self._condition.notify_all()

    def _run(self, batch: list[Job]) -> None:
        try:
            batch[0].run(batch)
        except Exception as error:  # noqa: BLE001 - a request must not end the thread
            if len(batch) == 1:
                batch[0].fail(error)
                return
            # An invalid job must not fail the others.
            for job in batch:
                if job.has_emitted:
                    job.fail(error)
                else:
                    self._run([job])


def _stopping() -> JobError:
    return JobError("the server is stopping", 503, "stopping")


def _equal(job: Job, other: Job) -> bool:
    return job.run == other.run and job.key == other.key
