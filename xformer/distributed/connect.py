"""The communicator that a program was started with, by name, and ranks that MPI connects (Dalcin and Fang, 2021)."""

from __future__ import annotations

import contextlib
import importlib
import sys
import time
import traceback
from collections.abc import Iterator
from typing import Any

import numpy as np

from xformer.distributed.communicator import Communicator, SingleProcess
from xformer.errors import BackendError, ConfigError, XformerError, how_to_install

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


class MPICommunicator(Communicator):
    """The processes that `mpiexec` has started.

    Arrays of other libraries than NumPy pass through the memory of the host. All sums are computed here: MPI only
    moves bytes, so its version and its choice of algorithms do not change a bit.

    Raises:
        BackendError: If mpi4py or an MPI library is missing.
    """

    def __init__(self) -> None:
        try:
            self._mpi = importlib.import_module("mpi4py.MPI")
        except (ImportError, RuntimeError) as error:  # mpi4py raises a RuntimeError if it finds no MPI library
            hint = how_to_install("mpi4py")
            raise BackendError(
                f"mpi4py cannot be loaded ({error}); {hint}, and an MPI library: pip install mpich"
            ) from error
        self._comm = self._mpi.COMM_WORLD.Dup()
        self.rank, self.size = self._comm.Get_rank(), self._comm.Get_size()

    def _all_to_all(self, rows: Any) -> Any:
        rows = np.ascontiguousarray(rows)
        received = np.empty_like(rows)
        self._comm.Alltoall(self._bytes(rows), self._bytes(received))
        return received

    def _all_gather(self, row: Any) -> Any:
        row = np.ascontiguousarray(row)
        received = np.empty((self.size, *row.shape), dtype=row.dtype)
        self._comm.Allgather(self._bytes(row), self._bytes(received))
        return received

    def _broadcast(self, array: Any, root: int) -> Any:
        array = np.array(array, order="C")  # a copy, which the other ranks write to
        self._comm.Bcast(self._bytes(array), root=root)
        return array

    def _bytes(self, array: Any) -> list[Any]:
        return [array.reshape(-1).view(np.uint8), self._mpi.BYTE]

    def local_rank(self) -> int:
        """Return the number of this rank among those of its host."""
        return int(self._comm.Split_type(self._mpi.COMM_TYPE_SHARED).Get_rank())

    def abort(self) -> None:
        """End all ranks with exit code 1."""
        self._comm.Abort(1)
