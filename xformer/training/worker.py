"""A process that differentiates shards for another one.

Threads of one process take turns in the interpreter, which costs a training step on NumPy some 15 % of its time.
A worker shares nothing with its owner but memory for the parameters and for its gradients; everything else comes as
messages through a pipe: first the function and the model, then one (shard, rng) a step.
"""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, Pipe
from typing import Any

from xformer.autodiff import value_and_grad
from xformer.errors import TrainingError
from xformer.host import ArraySpec, SharedArrays, keep_freed_memory
from xformer.namespace import dtype_name
from xformer.tree import flatten

_PROGRAM = "import sys; sys.path[:] = {path!r}; from xformer.training import worker; worker.serve({arguments})"


class Worker:
    """The owner's side of a worker process.

    function: (model, shard, rng) -> scalar; it must be importable by name, as functions of modules are.
    parameters: where the owner keeps the model's arrays, in shared memory.

    Raises TrainingError when the process does not start, or ends before its time.
    """

    def __init__(
        self, function: Callable[..., Any], model: Any, specs: Sequence[ArraySpec], parameters: SharedArrays
    ) -> None:
        self._gradients = SharedArrays(specs)
        self._connection, theirs = Pipe()
        inherited = (theirs.fileno(), parameters.descriptor, self._gradients.descriptor)
        self._process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM.format(path=sys.path, arguments=", ".join(map(str, inherited)))],
            pass_fds=inherited,
            stdin=subprocess.DEVNULL,
            env={**os.environ, **dict.fromkeys(_ONE_THREAD, "1")},
            process_group=0,  # Ctrl-C is for the owner, who finishes the step
        )
        theirs.close()
        self._send((function, model, specs))

    def start(self, shard: Any, rng: Any) -> None:
        """Begin with a shard; the parameters must not change until `result` was asked for."""
        self._send((shard, rng))

    def result(self) -> tuple[Any, list[Any]]:
        """Wait for the value and the gradients of the shard; the arrays are written again by the next one.

        What the function raised in the worker is raised here.
        """
        try:
            error, value = self._connection.recv()
        except (EOFError, OSError) as reason:
            raise self._ended() from reason
        if error is not None:
            raise error
        return value, self._gradients.arrays

    def close(self) -> None:
        """End the process."""
        self._connection.close()
        self._process.wait()
        self._gradients.close()

    def _send(self, message: Any) -> None:
        try:
            self._connection.send(message)
        except OSError as reason:
            raise self._ended() from reason

    def _ended(self) -> TrainingError:
        return TrainingError(f"a worker process ended with code {self._process.wait()}; is there memory for it?")


class Team:
    """Workers that share the parameters of one model."""

    def __init__(self, function: Callable[..., Any], model: Any, size: int) -> None:
        self._specs = _specs(model)
        self._parameters = SharedArrays(self._specs)
        self._workers = [Worker(function, model, self._specs, self._parameters) for _ in range(size)]

    def fits(self, model: Any, size: int) -> bool:
        """Tell whether the team was made for a model like this, and is large enough."""
        return size <= len(self._workers) and _specs(model) == self._specs

    def differentiate(
        self, model: Any, items: Sequence[tuple[Any, Any]], here: Callable[[Any], Any]
    ) -> list[tuple[Any, Any]]:
        """Return the value and gradients of each (shard, rng): the first by `here`, in this process."""
        leaves, rebuild = flatten(model)
        for shared, leaf in zip(self._parameters.arrays, leaves, strict=True):
            shared[...] = leaf
        busy = self._workers[: len(items) - 1]
        for worker, item in zip(busy, items[1:], strict=True):
            worker.start(*item)
        try:
            first = here(items[0])
        finally:
            answers = [worker.result() for worker in busy]
        return [first, *((value, rebuild(gradients)) for value, gradients in answers)]

    def close(self) -> None:
        """End all processes."""
        for worker in self._workers:
            worker.close()
        self._parameters.close()


def _specs(model: Any) -> list[ArraySpec]:
    return [(tuple(leaf.shape), dtype_name(leaf.dtype)) for leaf in flatten(model)[0]]


# Each worker has one core to itself.
_ONE_THREAD = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "XFORMER_NUM_THREADS")


def serve(pipe: int, parameters: int, gradients: int) -> None:
    """The worker's side: answer until the owner closes the pipe. The numbers are inherited file descriptors."""
    keep_freed_memory()
    warnings.simplefilter("ignore", RuntimeWarning)  # the owner checks for values that are not finite
    connection = Connection(pipe)
    try:
        function, model, specs = connection.recv()
        differentiated = value_and_grad(function)
        model = flatten(model)[1](SharedArrays(specs, parameters).arrays)
        shared = SharedArrays(specs, gradients).arrays
        while True:
            connection.send(_answer(differentiated, model, connection.recv(), shared))
    except EOFError:
        return


def _answer(differentiated: Callable[..., Any], model: Any, request: tuple[Any, Any], shared: list[Any]) -> Any:
    try:
        value, tree = differentiated(model, *request)
        for target, gradient in zip(shared, flatten(tree)[0], strict=True):
            target[...] = gradient
        return None, value
    except Exception as error:  # noqa: BLE001 - the owner raises it
        return error, None
