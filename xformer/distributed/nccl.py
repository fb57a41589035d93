"""Ranks with one NVIDIA GPU each, through NCCL and CuPy; MPI starts them."""

from __future__ import annotations

import importlib
import os
from typing import Any

import numpy as np

from xformer.backends import resolve
from xformer.distributed.communicator import Communicator
from xformer.errors import BackendError


class NCCLCommunicator(Communicator):
    """Exchanges CuPy arrays between GPUs without a copy to the host.

    The ranks of a host take its GPUs in order. NCCL moves bytes and adds nothing, so its choice of algorithms does not
    change a bit. Values that are no arrays pass through MPI.

    Args:
        mpi: The ranks.

    Raises:
        BackendError: If CuPy has no NCCL, or a host has more ranks than GPUs.
    """

    on_host = False

    def __init__(self, mpi: Any) -> None:
        self._mpi, self.rank, self.size = mpi, mpi.rank, mpi.size
        resolve("cupy")  # raises an error if it is missing
        self._cupy = importlib.import_module("cupy")
        try:
            self._nccl = importlib.import_module("cupy.cuda.nccl")
            unique_id = self._nccl.get_unique_id
        except (ImportError, AttributeError) as error:
            raise BackendError("this build of CuPy has no NCCL; run: pip install nvidia-nccl-cu13") from error
        self._type = self._nccl.NCCL_INT8
        local_rank, runtime = mpi.local_rank(), self._cupy.cuda.runtime
        count = runtime.getDeviceCount()
        if local_rank >= count:
            raise BackendError(f"{os.uname().nodename} has {count} GPUs; expected one for each of its ranks")
        runtime.setDevice(local_rank)
        name = np.zeros(128, dtype=np.int8)
        if self.rank == 0:
            name[:] = unique_id()
        shared = tuple(int(value) for value in mpi._broadcast(name, 0))
        self._communicator = self._nccl.NcclCommunicator(self.size, shared, self.rank)

    def _all_to_all(self, rows: Any) -> Any:
        rows = self._cupy.ascontiguousarray(rows)
        received = self._cupy.empty(rows.shape, rows.dtype)
        self._nccl.groupStart()
        for peer in range(self.size):
            self._communicator.send(rows[peer].data.ptr, rows[peer].nbytes, self._type, peer, self._stream())
            self._communicator.recv(received[peer].data.ptr, rows[peer].nbytes, self._type, peer, self._stream())
        self._nccl.groupEnd()
        return received

    def _all_gather(self, row: Any) -> Any:
        row = self._cupy.ascontiguousarray(row)
        received = self._cupy.empty((self.size, *row.shape), row.dtype)
        self._communicator.allGather(row.data.ptr, received.data.ptr, row.nbytes, self._type, self._stream())
        return received

    def _broadcast(self, array: Any, root: int) -> Any:
        source = self._cupy.ascontiguousarray(array)
        received = self._cupy.empty(source.shape, source.dtype)
        pointers = source.data.ptr, received.data.ptr
        self._communicator.broadcast(*pointers, source.nbytes, self._type, root, self._stream())
        return received

    def _all_gather_host(self, row: Any) -> Any:
        return self._mpi._all_gather(row)

    def _stream(self) -> int:
        return int(self._cupy.cuda.get_current_stream().ptr)

    def abort(self) -> None:
        """End all ranks with exit code 1."""
        self._communicator.abort()
        self._mpi.abort()
