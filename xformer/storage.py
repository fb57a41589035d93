"""Arrays in safetensors files: no pickle, checked on reading, written atomically."""

from __future__ import annotations

import hashlib
import importlib
import json
import os
from pathlib import Path
from typing import Any

from xformer.errors import BackendError, CheckpointError
from xformer.files import atomic_write
from xformer.namespace import (
    Array,
    array_namespace,
    base_namespace,
    dtype_name,
    dtype_named,
    from_host,
    library,
    resolve,
    to_host,
)

# safetensors' names of dtypes and ours.
_NAMES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "I32": "int32"}
_CHECKSUM = "blake2b"  # the metadata entry that tells a damaged file from a whole one


def save_arrays(path: str | os.PathLike[str], arrays: dict[str, Array], metadata: dict[str, str]) -> None:
    """Write named arrays of any library, atomically; a checksum goes with the metadata.

    Raises CheckpointError when the file cannot be written; a file that was there before stays as it was.
    """
    packed = {name: _pack(array) for name, array in arrays.items()}
    metadata = {**metadata, _CHECKSUM: _checksum(packed, metadata)}
    content = importlib.import_module("safetensors.numpy").save(packed, metadata=metadata)
    with atomic_write(path) as file:
        file.write(content)


def load_arrays(path: str | os.PathLike[str]) -> tuple[dict[str, Any], dict[str, str]]:
    """Read named arrays as (NumPy arrays, metadata); bfloat16 comes as float32, its values being exact there.

    Raises CheckpointError when the file is missing, truncated, damaged or not a safetensors file.
    """
    safetensors = importlib.import_module("safetensors")
    path = Path(path)
    try:
        content = path.read_bytes()
        tensors = safetensors.deserialize(content)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from error
    except safetensors.SafetensorError as error:
        raise CheckpointError(
            f"{path} is not a whole safetensors file ({error}); it is truncated or foreign"
        ) from error
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    metadata = dict(header.get("__metadata__") or {})
    arrays = {name: _unpack(path, name, tensor) for name, tensor in tensors}
    checksum = metadata.pop(_CHECKSUM, None)
    if checksum is not None and checksum != _checksum(arrays, metadata):
        raise CheckpointError(f"{path} is damaged: its content does not match its checksum; use another copy")
    return {name: _widen(array) for name, array in arrays.items()}, metadata


def place(arrays: dict[str, Any], like: dict[str, Array]) -> dict[str, Array]:
    """Move loaded arrays to the library, dtype and device of the arrays of the same names; others stay as they are."""
    placed = dict(arrays)
    for name, target in like.items():
        if name in arrays:
            xp = base_namespace(array_namespace(target))
            placed[name] = from_host(xp, arrays[name], dtype=target.dtype, device=getattr(target, "device", None))
    return placed


def restorable_dtype(xp: Any, name: str) -> str:
    """The floating dtype in which values saved as `name` are best held by `xp`: the same, or float32.

    NumPy multiplies bfloat16, which it only knows through ml_dtypes, an element at a time: there it is float32.
    """
    if library(resolve(xp)) == "numpy" and name == "bfloat16":
        return "float32"
    try:
        dtype_named(resolve(xp), name)
    except BackendError:
        return "float32"
    return name
