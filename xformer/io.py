"""Files: atomic writes, JSON, and arrays as safetensors. Everything is validated on reading; nothing is pickled."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.util
import json
import math
import operator
import os
import secrets
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, BinaryIO

import numpy as np

from xformer.backends import Array, array_namespace, dtype_name, resolve, to_host
from xformer.errors import BackendError, CheckpointError, ConfigError, abbreviate, describe_type

StrPath = str | os.PathLike[str]
_LFS_POINTER = b"version https://git-lfs.github.com/spec/v1"  # first line of the text file


def check_path(path: Any) -> None:
    """Raise CheckpointError unless a path is a string or a Path."""
    if not isinstance(path, str | os.PathLike):
        raise CheckpointError(f"path is {path!r}; expected a string or a Path")


def unwritable_parent(path: Path) -> Path | None:
    """Return the nearest existing parent of a path if files cannot be created in it, else None."""
    parent = next(parent for parent in path.absolute().parents if parent.exists())
    return None if parent.is_dir() and os.access(parent, os.W_OK) else parent


def check_no_overwrite(output: StrPath, protected: Iterable[StrPath | int], name: str) -> None:
    """Check that an output does not replace a file that is read or kept, under whatever path.

    Args:
        output: Path of the output.
        protected: Paths (which need not exist) or file descriptors.
        name: Name of the output in the error, e.g. "--output".

    Raises:
        ConfigError: If the output is one of the protected files.
    """
    for file in protected:
        with contextlib.suppress(OSError):
            status = os.stat(file)
            if stat.S_ISREG(status.st_mode) and os.path.samestat(status, os.stat(output)):
                path = "standard input" if isinstance(file, int) else file
                problem = f"{name} {output} would replace {path}, which is read or belongs to the run"
                raise ConfigError(f"{problem}; choose another name")


_PARTIAL = ".partial"  # end of the names of temporary files
_MAX_LINKS = 40  # one after another, as on Linux


@contextlib.contextmanager
def file_errors(message: str, hint: str = "") -> Iterator[None]:
    """Turn an OSError inside the block, but not that of a pipe, into CheckpointError: the message, reason and hint."""
    try:
        yield
    except OSError as error:
        if isinstance(error, CheckpointError | BrokenPipeError):
            raise
        raise CheckpointError(f"{message}: {error.strerror or error}{hint}") from error


@contextlib.contextmanager
def atomic_write(path: StrPath) -> Iterator[IO[bytes]]:
    """Open a binary file that appears at `path` only once everything is written and on disk.

    The bytes go to a temporary file in the same directory, which is flushed, fsynced and renamed to `path`. The file
    that it replaces hands over its permissions, and a symbolic link stays a link. A pipe, a device, or a descriptor of
    this process such as /dev/stdout, cannot be replaced: it receives the bytes as they are flushed.

    Raises:
        CheckpointError: If the disk is full or the directory is not writable. A file at `path` remains as it was.
        BrokenPipeError: If nobody reads the pipe.
    """
    check_path(path)
    hint = "; free space or choose another path (a file that was there before is intact)"
    with (
        file_errors(f"cannot write {path}", hint),
        _open_device(path) if is_device(path) else _replacement(Path(os.path.realpath(path))) as file,
    ):
        yield file


def write_bytes(path: StrPath, content: bytes) -> None:
    """Write a file as `atomic_write` does."""
    with atomic_write(path) as file:
        file.write(content)


@contextlib.contextmanager
def _replacement(path: Path) -> Iterator[IO[bytes]]:
    """Open a temporary file that replaces `path`, or nothing there, with the same owner and permissions."""
    try:
        status = path.stat()
    except FileNotFoundError:
        status = None
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}{_PARTIAL}")
    mode = 0o666 if status is None else 0o600  # of a private file, nobody else opens it before the copy of its mode
    try:
        with open(temporary, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            if status is not None:
                with contextlib.suppress(OSError, AttributeError):  # others' files; Windows
                    os.chown(temporary, status.st_uid, status.st_gid)
                os.chmod(temporary, stat.S_IMODE(status.st_mode))
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        with contextlib.suppress(OSError):
            os.unlink(temporary)


def is_device(path: StrPath) -> bool:
    """Return whether a path cannot be replaced: a device, a pipe, or a descriptor of this process."""
    return descriptor_of(path) is not None or (os.path.exists(path) and not os.path.isfile(path))


def _open_device(path: StrPath) -> IO[bytes]:
    number = descriptor_of(path)  # opening its path would truncate the file behind it
    return open(path, "wb") if number is None else os.fdopen(os.dup(number), "wb")


def descriptor_of(path: StrPath) -> int | None:
    """Return the descriptor of this process that a path names, e.g. 1 for /dev/stdout; None for any other path."""
    path = os.fspath(path)
    for _ in range(_MAX_LINKS):
        folder, name = os.path.split(path)
        if name.isdecimal() and os.path.realpath(folder) in ("/dev/fd", f"/proc/{os.getpid()}/fd"):
            return int(name)
        if not os.path.islink(path):
            break
        path = os.path.join(folder, os.readlink(path))
    return None


@contextlib.contextmanager
def atomic_directory(path: StrPath) -> Iterator[Path]:
    """Create a temporary directory that becomes the new directory `path` once everything is written.

    If `path` is an empty directory, e.g. a mounted volume, it is kept, and the files are moved into it one by one.
    A temporary directory that a killed process has left is removed.

    Raises:
        ConfigError: If `path` is neither new nor an empty directory.
        CheckpointError: If the disk is full or the directory is not writable. Nothing is left behind.
    """
    given, path = path, Path(os.path.realpath(path))  # a symbolic link stays a link
    exists = path.exists()
    if exists and (not path.is_dir() or any(path.iterdir())):
        raise ConfigError(f"{given} is not an empty directory; choose another one")
    temporary = (path if exists else path.parent) / f".{path.name}{_PARTIAL}"
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        yield temporary
        if exists:
            for file in temporary.iterdir():
                file.rename(path / file.name)
        else:
            temporary.rename(path)
    except CheckpointError as error:
        raise CheckpointError(str(error).replace(str(temporary), str(given))) from error
    except OSError as error:
        raise CheckpointError(f"cannot write {given}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


_locked: set[Path] = set()  # by this process


@contextlib.contextmanager
def lock_directory(directory: Path, activity: str = "training") -> Iterator[None]:
    """Lock a directory for this process; nested locks of one process are allowed.

    Temporary files that a killed process has left are removed.

    Args:
        directory: The directory.
        activity: Name of what a process that holds the lock does, for the error.

    Raises:
        CheckpointError: If another process holds the lock.
    """
    directory = directory.resolve()
    if directory in _locked:
        yield
        return
    lock_file = None if importlib.util.find_spec("fcntl") else directory / ".lock"  # Windows opens no directories
    with file_errors(f"cannot open {lock_file or directory}"):
        handle = os.open(directory, os.O_RDONLY) if lock_file is None else os.open(lock_file, os.O_RDWR | os.O_CREAT)
    try:
        try:
            if lock_file is None:
                fcntl: Any = importlib.import_module("fcntl")
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            else:
                msvcrt: Any = importlib.import_module("msvcrt")
                msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)
        except (BlockingIOError, PermissionError):
            problem = f"another process is {activity} in {directory}"
            raise CheckpointError(f"{problem}; stop it first, or choose another directory") from None
        except OSError:  # some network file systems have no locks
            pass
        _locked.add(directory)
        for path in directory.rglob(f".*{_PARTIAL}"):
            with contextlib.suppress(OSError):
                path.unlink()
        yield
    finally:
        _locked.discard(directory)
        os.close(handle)
        if lock_file is not None:
            with contextlib.suppress(OSError):  # another process may have opened it
                lock_file.unlink()


def to_json(value: Any) -> bytes:
    """Return `value` as indented JSON."""
    return f"{json.dumps(value, indent=2, ensure_ascii=False)}\n".encode()


def write_json(path: StrPath, value: Any) -> None:
    """Write `value` as indented JSON, atomically."""
    write_bytes(path, to_json(value))


def check_no_lfs_pointer(path: StrPath) -> None:
    """Raise CheckpointError for a pointer that Git LFS leaves in place of a file that was not downloaded."""
    with Path(path).open("rb") as file:
        if file.read(len(_LFS_POINTER)) == _LFS_POINTER:
            raise CheckpointError(f"{path} is a Git LFS pointer, not the file itself; run: git lfs pull")


def read_json(path: StrPath, description: str) -> dict[str, Any]:
    """Read a JSON object.

    Args:
        path: Path of the file.
        description: Description of the file in errors, e.g. "run configuration".

    Raises:
        CheckpointError: If the file is missing, truncated, or not a JSON object.
    """
    try:
        value = json.loads(Path(path).read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise CheckpointError(f"cannot read {description} {path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        check_no_lfs_pointer(path)
        problem = f"{description} {path} is not valid JSON ({error})"
        raise CheckpointError(f"{problem}; the file is truncated or in another format") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{description} {path} contains {describe_type(value)}; expected a JSON object")
    return value


def read_log(path: Path) -> list[dict[str, Any]]:
    """Return the JSON objects of the lines of a log, without a last line that a crash truncated; [] without a log."""
    events = []
    if path.exists():
        for line in path.read_text(encoding="utf-8-sig", errors="replace").split("\n"):
            try:
                event = json.loads(line)
            except ValueError:
                continue
            if isinstance(event, dict):
                events.append(event)
    return events


# --- Arrays -----------------------------------------------------------------------------------------------------------

# Names of dtypes, and their codes in safetensors files.
_KINDS = {"float": ("F", (64, 32, 16)), "bfloat": ("BF", (16,))}
_KINDS |= {"int": ("I", (64, 32, 16, 8)), "uint": ("U", (64, 32, 16, 8))}
_CODES = {f"{name}{bits}": f"{code}{bits}" for name, (code, sizes) in _KINDS.items() for bits in sizes}
_CODES["bool"] = "BOOL"
_NAMES = {code: name for name, code in _CODES.items()}
_SIZES = {code: 2 if name == "bfloat16" else np.dtype(name).itemsize for name, code in _CODES.items()}
_METADATA = "__metadata__"
_MAX_HEADER = 100_000_000  # the limit of the format
_CHECKSUM = "blake2b"  # metadata entry of files that xformer writes


def save_arrays(path: StrPath, arrays: Mapping[str, Array | Callable[[], Array]], metadata: dict[str, str]) -> None:
    """Write named arrays of any library to a safetensors file, atomically, with a checksum in its metadata.

    Args:
        path: Path of the file.
        arrays: Arrays by name; real floating, integer and boolean dtypes. Or functions that compute them, each of which
            is called twice: only one of their arrays is in memory at a time.
        metadata: Strings by name.

    Raises:
        CheckpointError: If the file cannot be written, or if a name, a dtype or the metadata are invalid. A file at
            `path` remains as it was.
    """
    if _METADATA in arrays or not all(isinstance(part, str) for item in metadata.items() for part in item):
        raise CheckpointError(f"cannot write {path}: expected metadata of strings, and no array named {_METADATA!r}")
    packed = {name: each if callable(each) else _pack(path, name, each) for name, each in arrays.items()}
    sizes: dict[str, tuple[int, str, tuple[int, ...], int]] = {}

    def host(name: str) -> Any:
        each = packed[name]
        return _pack(path, name, each()) if callable(each) else each

    def tensors() -> Iterator[tuple[str, str, Any, Any]]:
        for name in sorted(packed):
            x = host(name)
            sizes[name] = -x.dtype.itemsize, _CODES[x.dtype.name], x.shape, x.nbytes
            yield name, sizes[name][1], x.shape, x.reshape(-1).view("uint8")

    metadata = {**metadata, _CHECKSUM: _checksum(tensors(), metadata)}
    ordered = sorted(packed, key=lambda name: (sizes[name][0], name))  # as safetensors does, which aligns all data
    with atomic_write(path) as file:
        file.write(_header([(name, *sizes[name][1:]) for name in ordered], metadata))
        for name in ordered:  # directly from the arrays, since memory may not suffice for a copy
            file.write(host(name).reshape(-1).view("uint8"))


def check_savable(arrays: dict[str, Array]) -> None:
    """Raise ConfigError unless `save_arrays` can write arrays."""
    for name, array in arrays.items():
        if (dtype := dtype_name(array.dtype)) not in _CODES:
            raise ConfigError(f"{name} has dtype {dtype}, which no file can hold; expected one of {', '.join(_CODES)}")


def load_arrays(path: StrPath, *, keep: bool = False) -> tuple[dict[str, Any], dict[str, str]]:
    """Read a safetensors file.

    Returns:
        NumPy arrays by name, and the metadata. bfloat16 is read as in `bfloat16_of`.

    Raises:
        CheckpointError: If the file is missing, truncated, damaged or not a safetensors file.
    """
    check_path(path)
    path = Path(path)
    tensors = []
    with file_errors(f"cannot read {path}"), path.open("rb") as file:  # once: a training may replace the file
        entries, metadata = _read_header(path, file)
        for name, (code, shape, offset, num_bytes) in entries.items():
            data = bytearray(num_bytes)  # writable, so that the arrays are
            file.seek(offset)
            if file.readinto(data) != num_bytes:
                raise CheckpointError(f"{path} became shorter while it was read; read it again")
            tensors.append((name, code, shape, data))
    checksum = metadata.pop(_CHECKSUM, None)  # files of other programs have none
    if checksum is not None and checksum != _checksum(sorted(tensors, key=operator.itemgetter(0)), metadata):
        raise CheckpointError(f"{path} is damaged: its content does not match its checksum; use another copy")
    return {tensor[0]: _unpack(path, *tensor, keep=keep) for tensor in tensors}, metadata


Entry = tuple[str, tuple[int, ...], int, int]


def read_header(path: Path) -> tuple[dict[str, Entry], dict[str, str]]:
    """Read the header of a safetensors file, and check that its tensors fill the file without gaps.

    Args:
        path: Path of the file.

    Returns:
        Code of the dtype, shape, first byte in the file and number of bytes of each tensor, by name; and the metadata.
        The number of bytes is not compared with the shape if the dtype is unknown.

    Raises:
        CheckpointError: If the file is missing, truncated, damaged or not a safetensors file.
    """
    try:
        with path.open("rb") as file:
            return _read_header(path, file)
    except (OSError, ValueError) as error:  # ValueError for a name with a null character
        raise CheckpointError(f"cannot read {str(path)!r}: {getattr(error, 'strerror', None) or error}") from error


def _read_header(path: Path, file: BinaryIO) -> tuple[dict[str, Entry], dict[str, str]]:
    try:
        size = os.fstat(file.fileno()).st_size
        start = 8 + int.from_bytes(file.read(8), "little")
        if start > min(size, 8 + _MAX_HEADER):
            raise ValueError(f"it has {size:,} bytes, and its header would end at byte {start:,}")
        header = json.loads(file.read(start - 8).decode(), object_pairs_hook=_without_duplicates)
        if not isinstance(header, dict):
            raise ValueError(f"its header is {describe_type(header)}; expected a JSON object")
        metadata = header.pop(_METADATA, None)
        metadata = {} if metadata is None else metadata
        if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
            raise ValueError("its metadata is not a JSON object of strings")
        "".join([*header, *metadata, *metadata.values()]).encode()  # raises for half a surrogate pair
        entries = {name: _parse_entry(name, value, start) for name, value in header.items()}
        end = start
        for name, (_, _, offset, num_bytes) in sorted(entries.items(), key=lambda item: item[1][2:]):
            if offset != end:
                raise ValueError(f"its tensor {name} begins at byte {offset:,}; expected {end:,}")
            end += num_bytes
        if end != size:
            raise ValueError(f"it has {size:,} bytes; expected {end:,}")
    except (ValueError, RecursionError) as error:
        check_no_lfs_pointer(path)
        problem = f"{path} is not a valid safetensors file ({abbreviate(str(error), 300)})"
        raise CheckpointError(f"{problem}; it is truncated or in another format; use another copy") from error
    return entries, metadata


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the dict of an object in JSON; raise ValueError if it has a key twice."""
    value = dict(pairs)
    if len(value) < len(pairs):
        raise ValueError("its header has a key twice")
    return value


def _parse_entry(name: str, value: Any, start: int) -> Entry:
    """Return an entry of a header whose data begins at byte `start`; raise ValueError for an invalid one."""
    match value:
        # NumPy has no more dimensions, nor larger ones, even for an array without elements.
        case {"dtype": str(code), "shape": [*shape], "data_offsets": [begin, end]} if len(shape) <= 64:
            if all(type(number) is int and number >= 0 for number in (*shape, begin, end)):
                num_bytes = _SIZES.get(code, 0) * math.prod(shape)
                is_small = math.prod(number or 1 for number in shape) < 2**60
                if is_small and begin <= end and (code not in _SIZES or num_bytes == end - begin):
                    return code, tuple(shape), start + begin, end - begin
    raise ValueError(f"its tensor {name} is described by {abbreviate(str(value), 100)}")


def restore_like(arrays: dict[str, Any], like: dict[str, Array]) -> dict[str, Array]:
    """Move loaded arrays to the library, dtype and device of other arrays of the same names.

    Args:
        arrays: NumPy arrays by name; those without a counterpart stay as they are.
        like: The other arrays by name.
    """
    restored = dict(arrays)
    for name, target in like.items():
        if name in arrays:
            xp = array_namespace(target).library
            restored[name] = xp.from_host(arrays[name], dtype=target.dtype, device=getattr(target, "device", None))
    return restored


def restorable_dtype(xp: Any, name: str) -> str:
    """Return the floating dtype in which `xp` should hold values that were saved as `name`: the same, or float32.

    NumPy computes bfloat16, which it knows only through ml_dtypes, one element at a time, so it gets float32.
    """
    if resolve(xp).name == "numpy" and name == "bfloat16":
        return "float32"
    try:
        resolve(xp).dtype_named(name)
    except BackendError:
        return "float32"
    return name


def takes_bfloat16(xp: Any) -> bool:
    """Return whether a library reads the bfloat16 of ml_dtypes, which is half as much to copy as float32."""
    return resolve(xp).name == "cupy" and importlib.util.find_spec("ml_dtypes") is not None


def _checksum(tensors: Iterable[tuple[str, str, Any, Any]], metadata: dict[str, str]) -> str:
    """Compute the digest of the metadata and of all (name, dtype, shape, bytes), which are in the order of names."""
    digest = hashlib.blake2b(json.dumps(metadata, sort_keys=True).encode(), digest_size=16)
    for name, dtype, shape, data in tensors:
        digest.update(f"{name} {dtype} {list(shape)}".encode())
        digest.update(data)
    return digest.hexdigest()


def _header(tensors: list[tuple[str, str, Any, int]], metadata: dict[str, str]) -> bytes:
    """Return the header: its length in 8 bytes, and the metadata and offsets of all (name, dtype, shape, bytes)."""
    header: dict[str, Any] = {_METADATA: dict(sorted(metadata.items()))}
    end = 0
    for name, dtype, shape, num_bytes in tensors:
        begin, end = end, end + num_bytes
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": (begin, end)}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # aligns the data
    return len(text).to_bytes(8, "little") + text


def _pack(path: StrPath, name: str, array: Array) -> Any:
    """Return a contiguous little-endian NumPy array of the same dtype, also for bfloat16, which to_host upcasts."""
    host = np.asarray(to_host(array), order="C")
    if host.dtype.name not in _CODES:
        received = f"cannot write {path}: {name} has dtype {host.dtype.name}"
        raise CheckpointError(f"{received}; expected one of {', '.join(_CODES)}")
    if dtype_name(array.dtype) == "bfloat16":
        # Without ml_dtypes NumPy has no bfloat16; the file then holds the same values in float32.
        with contextlib.suppress(BackendError):
            host = host.astype(resolve("numpy").dtype_named("bfloat16"))
    return host.astype(host.dtype.newbyteorder("<"), copy=False)


def bfloat16_of(words: Any, *, keep: bool = False) -> Any:
    """Return bfloat16 numbers as float32, which holds their values exactly, or to `keep` them in NumPy's dtype."""
    if keep:
        return words.view(resolve("numpy").dtype_named("bfloat16"))
    return (words.astype("<u4") << np.uint32(16)).view("<f4")


def _unpack(path: Path, name: str, code: str, shape: Any, data: Any, *, keep: bool) -> Any:
    dtype = _NAMES.get(code)
    if dtype is None:
        raise CheckpointError(f"{path}: {name} has dtype {code}; expected one of {', '.join(_NAMES)}")
    if dtype == "bfloat16":
        return bfloat16_of(np.frombuffer(data, dtype="<u2"), keep=keep).reshape(shape)
    return np.frombuffer(data, dtype=dtype).reshape(shape)
