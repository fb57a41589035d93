"""Facts about ndonnx, whose arrays are computed by ONNX."""

from __future__ import annotations

from typing import Any

from xformer.backends.array_types import NativeArray as Array
from xformer.backends.backend import Backend, register_backend


class NdonnxBackend(Backend):
    """Facts about ndonnx."""

    def to_host(self, array: Array) -> Any:
        """Compute the array, which cannot be exported otherwise."""
        return array.unwrap_numpy()


register_backend(NdonnxBackend("ndonnx"))
