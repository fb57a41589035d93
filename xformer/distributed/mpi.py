"""Ranks that MPI connects, through mpi4py (Dalcin and Fang, 2021)."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np

from xformer.distributed.communicator import Communicator
from xformer.errors import BackendError, how_to_install


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
