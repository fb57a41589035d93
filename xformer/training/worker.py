"""Processes that differentiate shards for their owner.

A worker shares with its owner the memory of the parameters, which it reads, and of its gradients, which it writes.
All else are messages through a pipe: first the function and the model, then one (shard, rng) a step.
"""

from __future__ import annotations

import contextlib
import gc
import os
import subprocess
import sys
import warnings
import weakref
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, Pipe
from typing import Any

from xformer.autodiff import value_and_grad
from xformer.errors import TrainingError
from xformer.shared_memory import ArraySpec, SharedArrays
from xformer.threads import disable_malloc_trim
from xformer.tree import flatten

_PROGRAM = "import sys; sys.path[:] = {path!r}; from xformer.training import worker; worker.serve({descriptors})"
# Each worker is meant to keep one core busy.
_ONE_THREAD = dict.fromkeys(
    ("XFORMER_NUM_THREADS", "OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS"), "1"
)


class WorkerPool:
    """Workers that see the parameters of one model.

    function: (model, shard, rng) -> scalar, importable by name. size: how many workers there are, beside the owner.
    """

    def __init__(self, function: Callable[..., Any], model: Any, size: int) -> None:
        self._specs, self._owner = _specs(model), os.getpid()
        self._parameters = SharedArrays(self._specs)
        self._workers = [Worker(function, model, self._specs, self._parameters) for _ in range(size)]

    def fits(self, model: Any, size: int) -> bool:
        """Tell whether the team is large enough, of this process, and for a model of these shapes and dtypes."""
        return size <= len(self._workers) and os.getpid() == self._owner and _specs(model) == self._specs

    def differentiate(
        self, model: Any, items: Sequence[tuple[Any, Any]], here: Callable[[Any], tuple[Any, Any]]
    ) -> list[tuple[Any, Any]]:
        """Return the value and gradients of every (shard, rng); the first is done by `here`, in this process.

        The gradients of the others are overwritten by the next call. What the function raised in a worker is raised
        here; TrainingError says that a worker died.
        """
        leaves, rebuild = flatten(model)
        for shared, leaf in zip(self._parameters.arrays, leaves, strict=True):
            shared[...] = leaf
        busy = self._workers[: len(items) - 1]
        for worker, item in zip(busy, items[1:], strict=True):
            worker.send(item)
        try:
            results = [here(items[0])]
        finally:
            answers = [worker.receive() for worker in busy]  # all of them, so that none is taken for the next step's
        for worker, (value, error) in zip(busy, answers, strict=True):
            if error is not None:
                raise error
            results.append((value, rebuild(worker.gradients)))
        return results

    def close(self) -> None:
        """End all workers."""
        for worker in self._workers:
            worker.close()
        self._parameters.close()


def _specs(model: Any) -> list[ArraySpec]:
    return [(tuple(leaf.shape), leaf.dtype) for leaf in flatten(model)[0]]


class Worker:
    """The owner's side of one worker process: `send((shard, rng))`, then `receive()`, then read `gradients`."""

    def __init__(
        self, function: Callable[..., Any], model: Any, specs: Sequence[ArraySpec], parameters: SharedArrays
    ) -> None:
        memory = SharedArrays(specs)
        self.gradients = memory.arrays
        self._connection, theirs = Pipe()
        descriptors = (theirs.fileno(), parameters.descriptor, memory.descriptor)
        self._process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM.format(path=sys.path, descriptors=", ".join(map(str, descriptors)))],
            pass_fds=descriptors,
            stdin=subprocess.DEVNULL,
            env={**os.environ, **_ONE_THREAD},
            process_group=0,  # Ctrl-C is for the owner, who finishes the step
        )
        theirs.close()
        memory.close()
        # Also when nobody calls close(): a worker ends when its pipe does.
        self.close = weakref.finalize(self, _end, self._connection, self._process, os.getpid())
        self.send((function, model, specs))

    def send(self, message: Any) -> None:
        """Give the worker something to do."""
        try:
            self._connection.send(message)
        except OSError as reason:
            raise self._ended() from reason

    def receive(self) -> tuple[Any, BaseException | None]:
        """Wait for its answer: the value, or what went wrong."""
        try:
            return self._connection.recv()  # type: ignore[no-any-return]
        except (EOFError, OSError):
            return None, self._ended()

    def _ended(self) -> TrainingError:
        return TrainingError(
            f"a worker process ended with code {self._process.wait()}; its last words are above, if it had any"
        )


def _end(connection: Any, process: subprocess.Popen[bytes], owner: int) -> None:
    with contextlib.suppress(OSError):
        if os.getpid() == owner:
            connection.send(None)  # closing does not tell the worker while a fork has a copy of the pipe
    connection.close()
    process.wait()  # at once, in a fork


def serve(pipe: int, parameters: int, gradients: int) -> None:
    """The worker's own side: answer until the owner says None or is gone. The numbers are descriptors it inherited."""
    disable_malloc_trim()
    warnings.simplefilter("ignore", RuntimeWarning)  # the owner looks for values that are not finite
    connection = Connection(pipe)
    try:
        order = connection.recv()
        if order is None:  # the owner gave up before there was anything to do
            return
        function, model, specs = order
        shared_model = flatten(model)[1](SharedArrays(specs, parameters).arrays)
        shared_gradients = SharedArrays(specs, gradients).arrays
        differentiated = value_and_grad(function)
        gc.freeze()  # what is here by now stays, so the collector need not look at it again
        while (item := connection.recv()) is not None:
            connection.send(_answer(differentiated, shared_model, item, shared_gradients))
    except (EOFError, ConnectionError):  # the owner is gone
        return


def _answer(differentiated: Callable[..., Any], model: Any, item: Any, shared: list[Any]) -> Any:
    try:
        value, tree = differentiated(model, *item)
        for target, gradient in zip(shared, flatten(tree)[0], strict=True):
            target[...] = gradient
        return value, None
    except Exception as error:  # noqa: BLE001 - the owner raises it
        return None, error
