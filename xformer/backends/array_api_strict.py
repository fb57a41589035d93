"""How xformer uses array_api_strict, the reference implementation of the standard."""

from __future__ import annotations

from typing import Any

import array_api_strict
import numpy as np

from xformer.backends.array_types import NativeArray as Array
from xformer.backends.library import Library


class StrictLibrary(Library, library="array_api_strict"):
    """How xformer uses array_api_strict."""

    def to_host(self, array: Array) -> Any:
        """Move the array to the CPU first: the devices are simulated, and NumPy reads only the CPU's arrays."""
        return np.asarray(array.to_device(array_api_strict.Device("CPU_DEVICE")))

    def share_memory(self, x: Array, y: Array) -> bool:
        """Compare the arrays of NumPy inside; there is no DLPack of the simulated devices."""
        return bool(np.may_share_memory(x._array, y._array))
