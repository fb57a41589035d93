"""Arrays in files: exact in every library and dtype, and damage is noticed."""

from __future__ import annotations

import errno
import importlib
import json
import os
import tracemalloc

import numpy as np
import pytest

from tests.conftest import assert_close, library_or_skip
from tests.reference import normal, raises_line
from xformer.backends import from_host
from xformer.errors import BackendError, CheckpointError
from xformer.io import load_arrays, restorable_dtype, restore_like, save_arrays

VALUES = {"matrix": normal(0, 3, 4), "scalar": np.asarray(2.5), "empty": np.zeros((0, 3)), "view": normal(1, 4, 3).T}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "arrays.safetensors"


@pytest.mark.parametrize("dtype", ["float64", "float32", "int64", "int32"])
def test_arrays_come_back_to_the_bit(xp, path, dtype):
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


@pytest.mark.parametrize("metadata", [{}, {"note": "grüße"}])
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


def test_numbers_in_the_other_byte_order_are_those_numbers(path):
    save_arrays(path, {"a": np.asarray([1.0, 2.0, 3.0], ">f4")}, {})
    assert load_arrays(path)[0]["a"].tolist() == [1.0, 2.0, 3.0]


@pytest.mark.parametrize(("name", "metadata"), [("__metadata__", {}), ("a", {"step": 3}), ("a", {3: "step"})])
def test_what_could_not_be_read_is_not_written(path, name, metadata):
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


def test_files_of_other_writers_have_no_checksum_and_are_read(path):
    importlib.import_module("safetensors.numpy").save_file({"a": np.ones(3)}, path)
    assert load_arrays(path)[0]["a"].tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("with_ml_dtypes", [True, False])
def test_bfloat16_is_exact(path, monkeypatch, with_ml_dtypes):
    torch = library_or_skip("torch")
    array = torch.asarray([1.0, -0.1, 3e38, 1e-40, 0.0]).to(torch.bfloat16)
    if not with_ml_dtypes:
        module = importlib.import_module("xformer.io")

        def missing(*_):
            raise BackendError("bfloat16 needs ml_dtypes")

        monkeypatch.setattr(module, "dtype_named", missing)
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


def test_arrays_without_a_counterpart_stay_where_they_are():
    like = {"a": np.zeros(2, dtype="float32")}
    placed = restore_like({"a": np.ones(2), "b": np.ones(3)}, like)
    assert (placed["a"].dtype.name, placed["b"].dtype.name) == ("float32", "float64")
    assert restore_like({}, like) == {}


def test_a_dtype_without_a_place_is_refused(path):
    with raises_line(CheckpointError, r"cannot write .*: a has dtype complex128; expected one of float64"):
        save_arrays(path, {"a": np.zeros(2, dtype="complex128")}, {})
    assert not path.exists()


def test_a_full_disk_leaves_the_old_file(path, monkeypatch):
    save_arrays(path, {"a": np.zeros(3)}, {})

    def full(_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with raises_line(CheckpointError, r"cannot write .*arrays\.safetensors: No space left on device"):
        save_arrays(path, {"a": np.ones(3)}, {})
    assert load_arrays(path)[0]["a"].tolist() == [0.0, 0.0, 0.0]


# --- Damage -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def content(path):
    save_arrays(path, {"a": normal(0, 5), "b": normal(1, 2, 2)}, {"config": '{"pad_id": 0}'})
    return path.read_bytes()


def test_every_truncation_is_noticed(path, content):
    for length in [*range(16), *range(16, len(content), 7), len(content) - 1]:
        path.write_bytes(content[:length])
        with raises_line(CheckpointError, "is not a whole safetensors file .* it is truncated or foreign"):
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


@pytest.mark.parametrize("content", [b"PK\x03\x04" + bytes(300), b"{}", b"\x93NUMPY\x01\x00" + bytes(99), b"a" * 4096])
def test_files_of_another_kind_are_refused(path, content):
    path.write_bytes(content)
    with raises_line(CheckpointError, r"arrays\.safetensors is not a whole safetensors file"):
        load_arrays(path)


def test_files_that_are_not_there(path, tmp_path):
    with raises_line(CheckpointError, r"cannot read .*arrays\.safetensors: No such file or directory"):
        load_arrays(path)
    with raises_line(CheckpointError, r"cannot read .*: Is a directory"):
        load_arrays(tmp_path)


def test_dtypes_of_other_writers_that_have_no_place_here(path):
    importlib.import_module("safetensors.numpy").save_file({"a": np.ones(3, dtype="uint8")}, path)
    with raises_line(CheckpointError, r"a has dtype U8; expected one of F64, F32"):
        load_arrays(path)


def test_equal_content_is_equal_bytes(tmp_path):
    metadata = {f"note {number}": "grüße" for number in range(8)}
    for name in "ab":
        save_arrays(tmp_path / name, {"x": np.arange(3.0)}, metadata)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    arrays, found = load_arrays(tmp_path / "a")
    assert found == metadata
    assert arrays["x"].tolist() == [0.0, 1.0, 2.0]


def test_a_panic_of_the_library_is_a_lack_of_memory(tmp_path, monkeypatch):
    panic = type("PanicException", (BaseException,), {})

    def gives_up(*arguments, **keywords):
        raise panic("PyObject pointer is null")

    place = tmp_path / "a.safetensors"
    save_arrays(place, {"a": np.ones(3)}, {})
    before = place.read_bytes()
    monkeypatch.setattr("safetensors.deserialize", gives_up)
    with pytest.raises(MemoryError, match="safetensors gave up: PyObject pointer is null"):
        load_arrays(place)
    assert place.read_bytes() == before
