"""Atomic writes, JSON, and arrays in files: exact in every library and dtype, and damage is noticed."""

from __future__ import annotations

import errno
import importlib
import json
import os
import stat
import tracemalloc

import numpy as np
import pytest

from tests.conftest import assert_close, library_or_skip
from tests.reference import for_each, normal, raises_line
from xformer.backends import from_host, resolve
from xformer.errors import BackendError, CheckpointError, ConfigError
from xformer.io import (
    atomic_directory,
    atomic_write,
    check_no_overwrite,
    load_arrays,
    lock_directory,
    read_json,
    read_log,
    restorable_dtype,
    restore_like,
    save_arrays,
    write_json,
)


def write(path, content):
    with atomic_write(path) as file:
        file.write(content)


def test_the_file_appears_complete_with_ordinary_permissions(tmp_path):
    path = tmp_path / "new" / "folder" / "file.bin"
    with atomic_write(path) as file:
        file.write(b"first, ")
        assert not path.exists()
        file.write(b"second")
    assert path.read_bytes() == b"first, second"
    ordinary = tmp_path / "ordinary"
    ordinary.touch()
    assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE(ordinary.stat().st_mode)


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o666])
def test_a_file_that_is_replaced_keeps_its_permissions(tmp_path, mode):
    path = tmp_path / "file"
    path.write_bytes(b"old")
    path.chmod(mode)
    with atomic_write(path) as file:
        file.write(b"new")
        (temporary,) = tmp_path.glob(".file.*")
        assert stat.S_IMODE(temporary.stat().st_mode) == mode
    assert (path.read_bytes(), stat.S_IMODE(path.stat().st_mode)) == (b"new", mode)


@pytest.mark.parametrize("exists", [False, True])
def test_symbolic_links_stay_links(tmp_path, exists):
    """Of arrays, JSON and directories, through a chain of links into another directory."""
    folder = tmp_path / "folder"
    folder.mkdir()
    for name in ("file", "settings", "directory"):
        (tmp_path / "second" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "second" / name).symlink_to(f"../folder/{name}")
        (tmp_path / name).symlink_to(tmp_path / "second" / name)
    if exists:
        write(folder / "file", b"old")
        (folder / "file").chmod(0o600)
        (folder / "directory").mkdir(0o700)
    save_arrays(tmp_path / "file", {"x": np.ones(2)}, {})
    write_json(tmp_path / "settings", {"a": 1})
    with atomic_directory(tmp_path / "directory") as directory:
        write(directory / "inner", b"content")
    assert all((tmp_path / name).is_symlink() for name in ("file", "settings", "directory"))
    assert load_arrays(folder / "file")[0]["x"].tolist() == [1.0, 1.0]
    assert read_json(folder / "settings", "settings") == {"a": 1}
    assert (folder / "directory" / "inner").read_bytes() == b"content"
    assert not exists or stat.S_IMODE((folder / "file").stat().st_mode) == 0o600
    assert sorted(os.listdir(tmp_path)) == ["directory", "file", "folder", "second", "settings"]
    assert sorted(os.listdir(folder)) == ["directory", "file", "settings"]


def test_links_in_a_circle_are_refused(tmp_path):
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with raises_line(CheckpointError, "cannot write .*a: Too many levels of symbolic links"):
        write(tmp_path / "a", b"new")
    assert (tmp_path / "a").is_symlink()


def test_pipes_and_descriptors_receive_the_bytes(tmp_path):
    """A named pipe stays one, a file behind a descriptor keeps what it has, and a link to a descriptor is followed."""
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    with atomic_write(tmp_path / "pipe") as file:
        file.write(b"one")
        file.flush()
        assert os.read(reader, 100) == b"one"
    os.close(reader)
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)
    source, sink = os.pipe()
    (tmp_path / "link").symlink_to(f"/dev/fd/{sink}")
    write(tmp_path / "link", b"two")
    assert os.read(source, 100) == b"two"
    os.close(source)
    with pytest.raises(BrokenPipeError):
        write(f"/dev/fd/{sink}", b"three")
    os.close(sink)
    with (tmp_path / "log").open("ab", buffering=0) as log:
        log.write(b"before ")
        write(f"/dev/fd/{log.fileno()}", b"within ")
        log.write(b"after")
    assert (tmp_path / "log").read_bytes() == b"before within after"
    with raises_line(CheckpointError, "cannot write /dev/fd/999: Bad file descriptor"):
        write("/dev/fd/999", b"new")
    assert sorted(os.listdir(tmp_path)) == ["link", "log", "pipe"]


@pytest.mark.parametrize("failing", ["fsync", "replace"])
def test_a_full_disk_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch, failing):
    path = tmp_path / "file.bin"
    write(path, b"old")

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, failing, full)
    with raises_line(CheckpointError, r"cannot write .*file\.bin: No space left on device; free space or choose"):
        write(path, b"new")
    monkeypatch.undo()
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file.bin"]


def test_an_interrupted_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "file.bin"
    write(path, b"old")

    def interrupted():
        with atomic_write(path) as file:
            file.write(b"half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file.bin"]


@pytest.mark.parametrize("exists", [False, True])
def test_a_directory_appears_with_all_files_or_not_at_all(tmp_path, exists):
    path = tmp_path / "new" / "directory"
    if exists:
        path.mkdir(parents=True)

    def interrupted():
        with atomic_directory(path) as directory:
            (directory / "half").touch()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert os.listdir(path.parent) == (["directory"] if exists else [])
    assert not exists or os.listdir(path) == []
    with atomic_directory(path) as directory:
        write(directory / "file", b"content")
        write_json(directory / "folder" / "other.json", {})
        assert not (path / "file").exists()
    assert os.listdir(path.parent) == ["directory"]
    assert sorted(os.listdir(path)) == ["file", "folder"]
    assert (path / "file").read_bytes() == b"content"
    ordinary = tmp_path / "ordinary"
    ordinary.mkdir()
    assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE(ordinary.stat().st_mode)


def test_errors_of_a_directory_name_its_final_path(tmp_path):
    def full():
        with atomic_directory(tmp_path / "directory") as directory:
            raise CheckpointError(f"cannot write {directory}/file: No space left on device")

    with raises_line(CheckpointError, r"cannot write .*/directory/file: No space left on device"):
        full()
    (tmp_path / "file").touch()
    for path in (tmp_path, tmp_path / "file"):
        with raises_line(ConfigError, "is not an empty directory; choose another one"), atomic_directory(path):
            pass
    with (
        raises_line(CheckpointError, r"cannot write .*/file/directory: "),
        atomic_directory(tmp_path / "file" / "directory"),
    ):
        pass
    assert os.listdir(tmp_path) == ["file"]


def test_unwritable_paths_are_refused(tmp_path):
    (tmp_path / "file").touch()
    with raises_line(CheckpointError, r"cannot write .*file/child: (Not a directory|File exists)"):
        write(tmp_path / "file" / "child", b"")
    (tmp_path / "folder").mkdir()
    with raises_line(CheckpointError, r"cannot write .*folder: Is a directory"):
        write(tmp_path / "folder", b"")
    assert sorted(os.listdir(tmp_path)) == ["file", "folder"]


def test_json_round_trip(tmp_path):
    value = {"name": "größe", "sizes": [1, 2.5], "none": None}
    write_json(tmp_path / "a.json", value)
    assert read_json(tmp_path / "a.json", "settings") == value
    assert "größe" in (tmp_path / "a.json").read_text(encoding="utf-8")


def test_a_byte_order_mark_of_an_editor_is_dropped(tmp_path):
    (tmp_path / "a.json").write_bytes(b'\xef\xbb\xbf{"a": "\xef\xbb\xbf"}')
    assert read_json(tmp_path / "a.json", "settings") == {"a": "\ufeff"}
    (tmp_path / "log.jsonl").write_bytes(b'\xef\xbb\xbf{"a": 1}\n{"b": 2}\n')
    assert read_log(tmp_path / "log.jsonl") == [{"a": 1}, {"b": 2}]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"cannot read settings .*a\.json: No such file or directory"),
        (b"", r"settings .*a\.json is not valid JSON .*truncated or in another format"),
        (b'{"a": 1', r"settings .*a\.json is not valid JSON"),
        (b"\xff\xfe", r"settings .*a\.json is not valid JSON"),
        (b"[1]", r"settings .*a\.json contains a list; expected a JSON object"),
    ],
)
def test_invalid_json_is_refused(tmp_path, content, message):
    if content is not None:
        (tmp_path / "a.json").write_bytes(content)
    with raises_line(CheckpointError, message):
        read_json(tmp_path / "a.json", "settings")


def test_an_output_must_not_replace_an_input(tmp_path):
    (tmp_path / "a").write_text("a")
    (tmp_path / "b").hardlink_to(tmp_path / "a")
    check_no_overwrite(tmp_path / "new", [tmp_path / "a", tmp_path / "new"], "--out")
    check_no_overwrite("/dev/null", ["/dev/null"], "--out")
    with raises_line(ConfigError, "--out .*b would replace .*a, which is read or belongs to the run; choose another"):
        check_no_overwrite(tmp_path / "b", [tmp_path / "new", tmp_path / "a"], "--out")
    with (tmp_path / "a").open() as file, raises_line(ConfigError, "would replace standard input"):
        check_no_overwrite(tmp_path / "a", [file.fileno()], "--out")


# --- Arrays ---------------------------------------------------------------------------------------------------------

VALUES = {"matrix": normal(0, 3, 4), "scalar": np.asarray(2.5), "empty": np.zeros((0, 3)), "view": normal(1, 4, 3).T}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "arrays.safetensors"


@for_each("dtype", ["float64", "float32", "int64", "int32", "int16", "uint8", "bool"])
def test_arrays_round_trip_exactly(xp, path, dtype):
    arrays = {name: from_host(xp, np.round(100 * array).astype(dtype)) for name, array in VALUES.items()}
    save_arrays(path, arrays, {"note": "grüße"})
    loaded, metadata = load_arrays(path)
    assert metadata == {"note": "grüße"}
    assert loaded.keys() == VALUES.keys()
    placed = restore_like(loaded, arrays)
    for name, array in arrays.items():
        assert loaded[name].flags.writeable
        assert_close(placed[name], array, tolerance=0.0)


def test_other_readers_of_safetensors_understand_the_files(path):
    save_arrays(path, VALUES, {})
    for name, array in importlib.import_module("safetensors.numpy").load_file(path).items():
        np.testing.assert_array_equal(array, VALUES[name])


@for_each("metadata", [{}, {"note": "grüße"}])
def test_the_files_are_those_that_safetensors_writes(path, metadata):
    arrays = {"b": normal(0, 2, 3), "a": np.ones(3, "float32"), "c": np.asarray(2.5), "d": np.ones((0, 2), "float16")}
    save_arrays(path, arrays, metadata)
    with importlib.import_module("safetensors").safe_open(path, framework="numpy") as file:
        written = file.metadata()
    other = path.with_name("other")
    importlib.import_module("safetensors.numpy").save_file(arrays, other, metadata=dict(sorted(written.items())))
    contents = [file.read_bytes() for file in (path, other)]
    ends = [8 + int.from_bytes(content[:8], "little") for content in contents]
    headers = [json.loads(content[8:end]) for content, end in zip(contents, ends, strict=True)]
    assert headers[0] == headers[1]
    assert contents[0][ends[0] :] == contents[1][ends[1] :]
    assert ends[0] % 8 == 0


def test_big_endian_arrays_are_converted(path):
    save_arrays(path, {"a": np.asarray([1.0, 2.0, 3.0], ">f4")}, {})
    assert load_arrays(path)[0]["a"].tolist() == [1.0, 2.0, 3.0]


@for_each("name, metadata", [("__metadata__", {}), ("a", {"step": 3}), ("a", {3: "step"})])
def test_invalid_metadata_is_not_written(path, name, metadata):
    with pytest.raises(CheckpointError, match="expected metadata of strings, and no array named '__metadata__'"):
        save_arrays(path, {name: np.ones(3)}, metadata)
    assert not path.exists()


def test_saving_takes_no_memory_for_a_copy(path):
    arrays = {name: np.ones((500, 500)) for name in "abcd"}
    save_arrays(path, arrays, {})  # what is imported counts no more
    tracemalloc.start()
    try:
        save_arrays(path, arrays, {})
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1e6 < 8e6 < path.stat().st_size


@pytest.mark.parametrize("with_ml_dtypes", [True, False])
def test_bfloat16_is_exact(path, monkeypatch, with_ml_dtypes):
    torch = library_or_skip("torch")
    array = torch.asarray([1.0, -0.1, 3e38, 1e-40, 0.0]).to(torch.bfloat16)
    if not with_ml_dtypes:

        def missing(*_):
            raise BackendError("bfloat16 needs ml_dtypes")

        monkeypatch.setattr(type(resolve("numpy")), "dtype_named", missing)
    save_arrays(path, {"a": array}, {})
    monkeypatch.undo()
    loaded, _ = load_arrays(path)
    assert loaded["a"].dtype == np.float32
    assert_close(restore_like(loaded, {"a": array})["a"], array, tolerance=0.0)
    entry = json.loads(path.read_bytes()[8:].split(b"}}")[0] + b"}}")["a"]
    assert entry["dtype"] == ("BF16" if with_ml_dtypes else "F32")


def test_the_dtype_to_restore():
    assert restorable_dtype("numpy", "float64") == "float64"
    assert restorable_dtype("numpy", "bfloat16") == "float32"
    assert restorable_dtype(library_or_skip("array_api_strict"), "float16") == "float32"
    assert restorable_dtype(library_or_skip("torch"), "bfloat16") == "bfloat16"


def test_unsupported_dtypes_are_not_written(path):
    with raises_line(CheckpointError, r"cannot write .*: a has dtype complex128; expected one of float64"):
        save_arrays(path, {"a": np.zeros(2, dtype="complex128")}, {})
    assert not path.exists()


# --- Damage -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def content(path):
    save_arrays(path, {"a": normal(0, 5), "b": normal(1, 2, 2)}, {"config": '{"pad_id": 0}'})
    return path.read_bytes()


def test_every_truncation_is_noticed(path, content):
    for length in [*range(16), *range(16, len(content), 7), len(content) - 1]:
        path.write_bytes(content[:length])
        with raises_line(CheckpointError, "is not a valid safetensors file .* it is truncated or in another format"):
            load_arrays(path)


def test_every_changed_byte_is_noticed_or_harmless(path, content):
    """Harmless: in the name of the checksum, or a blank that became another."""
    generator, noticed = np.random.default_rng(0), 0
    for index in range(len(content)):
        damaged = bytearray(content)
        damaged[index] ^= 1 << int(generator.integers(8))
        path.write_bytes(damaged)
        try:
            arrays, metadata = load_arrays(path)
        except CheckpointError:
            noticed += 1
        else:
            assert metadata["config"] == '{"pad_id": 0}'
            np.testing.assert_array_equal(arrays["a"], normal(0, 5))
            np.testing.assert_array_equal(arrays["b"], normal(1, 2, 2))
    assert noticed >= len(content) - 20


def test_a_key_that_comes_twice_is_refused(path):
    entry = '"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}'
    header = f"{{{entry},{entry}}}".encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    with raises_line(CheckpointError, "its header has a key twice"):
        load_arrays(path)


def test_the_headers_that_safetensors_refuses_are_refused(path):
    entry = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    second = {**entry, "data_offsets": [8, 16]}
    headers = [
        *({"b": second, "a": entry}, {"__metadata__": None, "a": {**entry, "shape": [2, 1], "more": 1}}),
        *({"a": entry}, {"a": entry, "b": entry}, {"b": second}, {"a": {**entry, "shape": [3]}}, [entry], {"a": []}),
        *({"a": {**entry, name: value}} for name in entry for value in (None, 2, "a", [], [-1], [True], [0, 8.0])),
        *({"a": entry, "__metadata__": value} for value in ([], 0, {"a": 1}, {"a": None})),
        {"a": {"dtype": "F32"}},
        {"\ud800": entry},
    ]
    safetensors = importlib.import_module("safetensors")
    accepted = 0
    for header in headers:
        text = json.dumps(header).encode()
        content = len(text).to_bytes(8, "little") + text + bytes(16 if "[8, 16]" in str(header) else 8)
        path.write_bytes(content)
        try:
            expected = {name: bytes(tensor["data"]) for name, tensor in safetensors.deserialize(content)}
        except safetensors.SafetensorError:
            with raises_line(CheckpointError, "is not a valid safetensors file|a has dtype a; expected one of F64"):
                load_arrays(path)
        else:
            assert {name: x.tobytes() for name, x in load_arrays(path)[0].items()} == expected
            accepted += 1
    assert accepted == 3


@for_each("shape", [(0, 2**62, 4), (0, *[1] * 64)])
def test_shapes_beyond_numpy_are_refused(path, shape):
    header = json.dumps({"a": {"dtype": "F32", "shape": shape, "data_offsets": (0, 0)}}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    with raises_line(CheckpointError, "is not a valid safetensors file .its tensor a is described by"):
        load_arrays(path)


def test_files_that_a_killed_process_left_are_removed(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    left = [tmp_path / ".last.safetensors.abcdefgh.partial", tmp_path / "checkpoints" / ".step.x.partial"]
    for path in [*left, tmp_path / ".mine", tmp_path / "data.partial"]:
        path.touch()
    with lock_directory(tmp_path):
        assert sorted(path.name for path in tmp_path.iterdir()) == [".mine", "checkpoints", "data.partial"]
        assert not list((tmp_path / "checkpoints").iterdir())
