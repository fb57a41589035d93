"""How xformer uses ndonnx, whose arrays are computed by ONNX."""

from __future__ import annotations

from typing import Any

from xformer.backends.array_types import NativeArray as Array
from xformer.backends.library import Library


class NdonnxLibrary(Library, library="ndonnx"):
    """How xformer uses ndonnx."""

    def to_host(self, array: Array) -> Any:
        """Compute the array, which cannot be exported otherwise."""
        return array.unwrap_numpy()
