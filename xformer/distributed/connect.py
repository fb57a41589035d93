"""The communicator that a program was started with, by name."""

from __future__ import annotations

import contextlib
import sys
import time
import traceback
from collections.abc import Iterator
from typing import Any

from xformer.distributed.communicator import Communicator, SingleProcess
from xformer.distributed.mpi import MPICommunicator
from xformer.errors import ConfigError, XformerError

COMMUNICATORS = ("mpi", "nccl")
_SECONDS_FOR_RANK_0 = 2.0  # to report an error that all ranks have


def connect(name: str | None = "mpi") -> Communicator:
    """Return the communicator of the processes that a launcher has started.

    An error that a program does not catch on one of several ranks then ends all of them.

    Args:
        name: "mpi"; "nccl" for CuPy arrays on NVIDIA GPUs, one for each rank, where MPI only starts the processes; or
            None for a program that is alone.

    Raises:
        ConfigError: For another name.
        BackendError: If a package is missing.
    """
    if name is None:
        return SingleProcess()
    if name not in COMMUNICATORS:
        raise ConfigError(f"communicator is {name!r}; expected {' or '.join(map(repr, COMMUNICATORS))}")
    if name == "nccl":
        from xformer.distributed.nccl import NCCLCommunicator

        mpi = MPICommunicator()
        with abort_on_error(mpi):
            return _ending_together(NCCLCommunicator(mpi))
    return _ending_together(MPICommunicator())


def _ending_together(communicator: Communicator) -> Communicator:
    """Let uncaught errors end all ranks."""
    if communicator.size > 1:

        def end_all(kind: type[BaseException], error: BaseException, trace: Any) -> None:
            sys.__excepthook__(kind, error, trace)
            communicator.abort()

        sys.excepthook = end_all
    return communicator


@contextlib.contextmanager
def abort_on_error(communicator: Communicator) -> Iterator[None]:
    """End all ranks if the block raises on one of them: the others would wait forever.

    The error is printed on stderr; once if all ranks have the same one. A program that is alone just raises it.
    """
    try:
        yield
    except BaseException as error:
        if communicator.size == 1:
            raise
        if communicator.rank > 0:
            time.sleep(_SECONDS_FOR_RANK_0)
        if isinstance(error, XformerError | OSError):
            print(f"error: {' '.join(str(error).split())}", file=sys.stderr, flush=True)  # noqa: T201
        else:
            traceback.print_exception(error)
        communicator.abort()
        raise
