"""Arrays in safetensors files: no pickle, checked on reading, written atomically."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any

from xformer.errors import CheckpointError
from xformer.files import atomic_write
from xformer.namespace import Array, array_namespace, base_namespace, dtype_name, dtype_named, from_host, resolve, to_host

# safetensors' names of dtypes and ours.
_NAMES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "I32": "int32"}


def save_arrays(path: str | os.PathLike[str], arrays: dict[str, Array], metadata: dict[str, str]) -> None:
    """Write named arrays of any library, atomically.

    Raises CheckpointError when the file cannot be written; a file that was there before stays as it was.
    """
    content = importlib.import_module("safetensors.numpy").save(
        {name: _pack(array) for name, array in arrays.items()}, metadata=metadata
    )
    with atomic_write(path) as file:
        file.write(content)


def load_arrays(path: str | os.PathLike[str]) -> tuple[dict[str, Any], dict[str, str]]:
    """Read named arrays as (NumPy arrays, metadata); bfloat16 comes as float32, its values being exact there.

    Raises CheckpointError when the file is missing, truncated or not a safetensors file.
    """
    safetensors = importlib.import_module("safetensors")
    path = Path(path)
    try:
        content = path.read_bytes()
        tensors = safetensors.deserialize(content)
        with safetensors.safe_open(path, framework="numpy") as file:
            metadata = dict(file.metadata() or {})
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from error
    except safetensors.SafetensorError as error:
        raise CheckpointError(f"{path} is not a whole safetensors file ({error}); it is truncated or foreign") from error
    return {name: _unpack(path, name, tensor) for name, tensor in tensors}, metadata


def place(arrays: dict[str, Any], like: dict[str, Array]) -> dict[str, Array]:
    """Move loaded arrays to the library, dtype and device of the arrays of the same names."""
    placed = {}
    for name, target in like.items():
        if name in arrays:
            xp = base_namespace(array_namespace(target))
            placed[name] = from_host(xp, arrays[name], dtype=target.dtype, device=getattr(target, "device", None))
    return placed


def _pack(array: Array) -> Any:
    """A contiguous NumPy array of the same dtype; bfloat16, which to_host widens exactly, is narrowed again."""
    numpy = importlib.import_module("numpy")
    host = numpy.ascontiguousarray(to_host(array))
    if dtype_name(array.dtype) == "bfloat16":
        host = host.astype(dtype_named(resolve("numpy"), "bfloat16"))
    return host


def _unpack(path: Path, name: str, tensor: dict[str, Any]) -> Any:
    numpy = importlib.import_module("numpy")
    dtype = _NAMES.get(tensor["dtype"])
    if dtype is None:
        raise CheckpointError(f"{path}: {name} has dtype {tensor['dtype']}; expected one of {', '.join(_NAMES)}")
    if dtype == "bfloat16":
        wide = numpy.frombuffer(tensor["data"], dtype="uint16").astype("uint32") << 16
        return wide.view("float32").reshape(tensor["shape"])
    # A copy, because the buffer is read-only and parameters are updated in place.
    return numpy.frombuffer(tensor["data"], dtype=dtype).reshape(tensor["shape"]).copy()
