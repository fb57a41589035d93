"""An executor of processes that survives the death of any of them."""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from typing import Any

from xformer.config import check_count
from xformer.errors import CorpusError
from xformer.threads import num_threads, set_num_threads


class WorkerProcesses(Executor):
    """Processes of this machine that run tasks, and share its cores.

    If a process dies, only its task fails; a new process runs the next one. `ProcessPoolExecutor` would fail all tasks.
    Processes end when this one ends, also if it is killed. They are spawned: a script that makes them needs
    `if __name__ == "__main__"`.

    Args:
        num_workers: Number of processes. Each computes on an equal share of the threads of this process.

    Raises:
        ConfigError: If the number is below 1.
    """

    def __init__(self, num_workers: int) -> None:
        check_count("num_workers", num_workers)
        self._num_threads = max(1, num_threads() // num_workers)
        self._threads = ThreadPoolExecutor(num_workers, thread_name_prefix="worker")  # each thread owns a process
        self._local = threading.local()
        self._processes: set[Any] = set()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Run a function in one of the processes; the function, its arguments and its result are pickled."""
        return self._threads.submit(self._run, functools.partial(fn, *args, **kwargs))

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the processes: after their tasks with `wait`, otherwise at once."""
        self._threads.shutdown(wait=wait, cancel_futures=cancel_futures)
        for process in [*self._processes]:
            process.kill()

    def __exit__(self, error_type: Any, *error: Any) -> None:
        self.shutdown(wait=error_type is None, cancel_futures=error_type is not None)

    def _run(self, task: Callable[[], Any]) -> Any:
        """Run a task in the process of this thread."""
        if getattr(self._local, "process", None) is None:
            context = multiprocessing.get_context("spawn")
            self._local.connection, other = context.Pipe()
            process = context.Process(target=_work, args=(other, self._num_threads), daemon=True)
            with _without_interrupts():
                process.start()
            other.close()  # so that the connection ends with the process
            self._processes.add(process)
            self._local.process = process
        process, connection = self._local.process, self._local.connection
        try:
            connection.send(task)
            result, error = connection.recv()
        except (EOFError, OSError):
            process.join()
            self._processes.discard(process)
            self._local.process = None
            reason = f"was killed by signal {-process.exitcode}" if process.exitcode < 0 else "ended"
            raise CorpusError(f"a worker process {reason} during a task; it may have run out of memory") from None
        if error is not None:
            raise error
        return result


@contextlib.contextmanager
def _without_interrupts() -> Iterator[None]:
    """Block SIGINT in this thread, and for good in processes that it starts.

    Ctrl-C reaches all processes of a terminal, also those that still import their modules. The parent handles it.
    """
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    resource_tracker.ensure_running()  # the first start of a process would start it, and unblock SIGINT
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _work(connection: Connection, num_threads: int) -> None:
    """Run the tasks that arrive, until the parent process ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # where it could not be blocked
    set_num_threads(num_threads)
    with contextlib.suppress(EOFError):
        while True:
            task = connection.recv()
            try:
                connection.send((task(), None))
            except Exception as error:  # noqa: BLE001 - raised by the caller
                connection.send((None, error))
