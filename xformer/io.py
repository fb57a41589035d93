"""Files: written atomically, safetensors without pickle, JSON; everything is validated on reading."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import json
import os
import stat
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from xformer.backends import (
    Array,
    array_namespace,
    backend_name,
    base_namespace,
    dtype_name,
    dtype_named,
    from_host,
    resolve,
    to_host,
)
from xformer.errors import BackendError, CheckpointError, ConfigError


def unwritable_parent(path: Path) -> Path | None:
    """The nearest thing above a path that exists, where nothing can be made in it; None where something can."""
    parent = next(parent for parent in path.absolute().parents if parent.exists())
    return None if parent.is_dir() and os.access(parent, os.W_OK) else parent


def check_no_overwrite(
    output: str | os.PathLike[str], kept: Iterable[str | os.PathLike[str] | int], called: str
) -> None:
    """Raise ConfigError where an output would replace a file that is read or kept, under whatever name.

    kept: files that need not exist, or descriptors; called: what the error calls the output, such as "--output".
    """
    for file in kept:
        with contextlib.suppress(OSError):
            found = os.stat(file)
            if stat.S_ISREG(found.st_mode) and os.path.samestat(found, os.stat(output)):
                name = "standard input" if isinstance(file, int) else file
                raise ConfigError(
                    f"{called} {output} would replace {name}, which is read or belongs to the run; choose another name"
                )


@contextlib.contextmanager
def atomic_write(path: str | os.PathLike[str]) -> Iterator[IO[bytes]]:
    """Open a binary file that appears at `path` only once everything is written and on disk.

    The bytes go to a temporary file in the same directory, which is flushed, fsynced and renamed over `path`.

    Raises CheckpointError when the disk is full or the place is not writable; what stood at `path` is untouched.
    """
    path = Path(path)
    temporary: str | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        # mkstemp makes the file private; give it the permissions an ordinary open() would.
        umask = os.umask(0)
        os.umask(umask)
        os.fchmod(descriptor, 0o666 & ~umask)
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        temporary = None
        _sync_directory(path.parent)
    except OSError as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(
            f"cannot write {path}: {error.strerror or error}; free space or choose another place "
            "(whatever was saved there before is intact)"
        ) from error
    finally:
        if temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(temporary)


def _sync_directory(directory: Path) -> None:
    """Make the rename itself durable, where the system lets a directory be opened."""
    with contextlib.suppress(OSError):
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def write_json(path: str | os.PathLike[str], value: Any) -> None:
    """Write `value` as indented JSON, atomically."""
    text = json.dumps(value, indent=2, ensure_ascii=False) + "\n"
    with atomic_write(path) as file:
        file.write(text.encode("utf-8"))


def read_json(path: str | os.PathLike[str], what: str) -> dict[str, Any]:
    """Read a JSON object; `what` names it in the error ("run configuration").

    Raises CheckpointError when the file is missing, truncated, or not a JSON object.
    """
    try:
        value = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"cannot read {what} {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise CheckpointError(f"{what} {path} is not valid JSON ({error}); the file is truncated or foreign") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{what} {path} holds a {type(value).__name__}; expected a JSON object")
    return value


# --- safetensors ---

# Our names of dtypes and those of safetensors.
_CODES = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64", "int32": "I32"}
_NAMES = {code: name for name, code in _CODES.items()}
_METADATA = "__metadata__"
_CHECKSUM = "blake2b"  # the metadata entry that tells a damaged file from a whole one


def save_arrays(path: str | os.PathLike[str], arrays: dict[str, Array], metadata: dict[str, str]) -> None:
    """Write named arrays of any library, atomically; a checksum goes with the metadata.

    Raises CheckpointError when the file cannot be written, or an array has a dtype, or a name, that has no place in it,
    or metadata are no strings; a file that was there before stays as it was.
    """
    if _METADATA in arrays or not all(isinstance(part, str) for item in metadata.items() for part in item):
        raise CheckpointError(f"cannot write {path}: expected metadata of strings, and no array named {_METADATA!r}")
    packed = {name: _pack(path, name, array) for name, array in arrays.items()}
    # As other writers do it: the widest dtypes first, so that all data is aligned.
    ordered = sorted(packed.items(), key=lambda item: (-item[1].dtype.itemsize, item[0]))
    described = [(name, _CODES[host.dtype.name], host.shape, host.reshape(-1).view("uint8")) for name, host in ordered]
    metadata = {**metadata, _CHECKSUM: _checksum(described, metadata)}
    with atomic_write(path) as file:
        file.write(_header(described, metadata))
        for _, _, _, data in described:  # straight from the arrays: there may be no memory for a copy
            file.write(data)


@contextlib.contextmanager
def _panics() -> Iterator[None]:
    """Raise MemoryError where safetensors, which is written in Rust, panics: that is how it runs out of memory."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise MemoryError(f"safetensors gave up: {error}") from error


def load_arrays(path: str | os.PathLike[str]) -> tuple[dict[str, Any], dict[str, str]]:
    """Read named arrays as (NumPy arrays, metadata); bfloat16 comes as float32, its values being exact there.

    Raises CheckpointError when the file is missing, truncated, damaged or not a safetensors file.
    """
    safetensors = importlib.import_module("safetensors")
    path = Path(path)
    try:
        content = path.read_bytes()
        with _panics():
            tensors = safetensors.deserialize(content)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from error
    except safetensors.SafetensorError as error:
        raise CheckpointError(
            f"{path} is not a whole safetensors file ({error}); it is truncated or foreign; use another copy"
        ) from error
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    metadata = dict(header.get(_METADATA) or {})
    described = [(name, tensor["dtype"], tensor["shape"], tensor["data"]) for name, tensor in tensors]
    checksum = metadata.pop(_CHECKSUM, None)  # files from elsewhere have none
    if checksum is not None and checksum != _checksum(described, metadata):
        raise CheckpointError(f"{path} is damaged: its content does not match its checksum; use another copy")
    return {tensor[0]: _unpack(path, *tensor) for tensor in described}, metadata


def verify_checkpoint(path: str | os.PathLike[str], *, without: str) -> None:
    """Raise CheckpointError for a file that `load_arrays` refuses; without: what happens once it is removed."""
    try:
        load_arrays(path)
    except CheckpointError as error:
        raise CheckpointError(f"{error}, or remove it, so that {without}") from error


def restore_like(arrays: dict[str, Any], like: dict[str, Array]) -> dict[str, Array]:
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
    if backend_name(resolve(xp)) == "numpy" and name == "bfloat16":
        return "float32"
    try:
        dtype_named(resolve(xp), name)
    except BackendError:
        return "float32"
    return name


def _checksum(tensors: list[tuple[str, str, Any, Any]], metadata: dict[str, str]) -> str:
    """Digest of the metadata and of all (name, dtype, shape, bytes), in the order of their names."""
    digest = hashlib.blake2b(json.dumps(metadata, sort_keys=True).encode(), digest_size=16)
    for name, dtype, shape, data in sorted(tensors, key=lambda tensor: tensor[0]):
        digest.update(f"{name} {dtype} {list(shape)}".encode())
        digest.update(data)
    return digest.hexdigest()


def _header(tensors: list[tuple[str, str, Any, Any]], metadata: dict[str, str]) -> bytes:
    """What comes before the data: its own length in 8 bytes, and as JSON the metadata and where each tensor is."""
    header: dict[str, Any] = {_METADATA: dict(sorted(metadata.items()))}
    end = 0
    for name, dtype, shape, data in tensors:
        begin, end = end, end + len(data)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": (begin, end)}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # the format wants the data aligned
    return len(text).to_bytes(8, "little") + text


def _pack(path: str | os.PathLike[str], name: str, array: Array) -> Any:
    """A contiguous NumPy array of the same dtype; bfloat16, which to_host widens exactly, is narrowed again."""
    numpy = importlib.import_module("numpy")
    host = numpy.asarray(to_host(array), order="C")
    if host.dtype.name not in _CODES:
        raise CheckpointError(
            f"cannot write {path}: {name} has dtype {host.dtype.name}; expected one of {', '.join(_CODES)}"
        )
    if dtype_name(array.dtype) == "bfloat16":
        # Without ml_dtypes NumPy has no bfloat16; the file is then larger, and as exact.
        with contextlib.suppress(BackendError):
            host = host.astype(dtype_named(resolve("numpy"), "bfloat16"))
    return host.astype(host.dtype.newbyteorder("<"), copy=False)


def _unpack(path: Path, name: str, code: str, shape: Any, data: Any) -> Any:
    numpy = importlib.import_module("numpy")
    dtype = _NAMES.get(code)
    if dtype is None:
        raise CheckpointError(f"{path}: {name} has dtype {code}; expected one of {', '.join(_NAMES)}")
    if dtype == "bfloat16":
        wide = numpy.frombuffer(data, dtype="uint16").astype("uint32") << 16
        return wide.view("float32").reshape(shape)
    return numpy.frombuffer(data, dtype=dtype).reshape(shape)  # writable: safetensors hands out bytearrays
